"""Rewards by rank: ties, the order of the answers, and verdicts that cannot be read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

import agentlightning as agl
from tests.chat.test_judge import between, model_of, said
from tests.stubs.model_server import ModelServer


def by_length(request: dict[str, Any]) -> str:
    """Rank answers by their length, equally long ones alike."""
    shown = between("answer", said(request))
    lengths = sorted({len(answer) for answer in shown})
    levels = [[place for place, answer in enumerate(shown, start=1) if len(answer) == length] for length in lengths]
    return f"Shorter is better. {json.dumps({'ranking': levels})}"


@pytest.mark.parametrize(
    ("judge", "answers", "rewards", "ties", "bias"),
    [
        (by_length, ["ccc", "a", "bb", "dd", "a"], (0.0, 1.0, 0.5, 0.5, 1.0), 2, 0.0),
        (lambda request: '{"ranking": [1, 2, 3]}', ["a", "b", "c"], (0.5, 0.5, 0.5), 3, 1.0),
        (by_length, ["a", "a", "a"], (0.5, 0.5, 0.5), 3, 0.0),
    ],
    ids=["places_are_rewards", "a_judge_that_likes_the_first_place_is_found_out", "equal_answers_are_not_asked_about"],
)
def test_answers_earn_the_mean_of_their_places_and_equal_ones_share_them(
    judge: Any, answers: list[str], rewards: tuple[float, ...], ties: int, bias: float
) -> None:
    with ModelServer(judge) as server:
        ranking = asyncio.run(agl.RankingReward(model_of(server)).rank("a task", answers))
    assert (ranking.rewards, ranking.ties, ranking.position_bias) == (rewards, ties, bias)
    questions = [between("answer", said(call.request)) for call in server.calls]
    assert ranking.bill.calls == len(questions) == (0 if len(set(answers)) == 1 else 2)
    if questions:
        assert questions[0] == questions[1][::-1]


@pytest.mark.parametrize(
    "reply",
    [
        '{"ranking": [1, 1]}',
        '{"ranking": [1]}',
        '{"ranking": "A"}',
        '{"ranking": "21"}',
        '{"ranking": {"1": 2, "2": 1}}',
        '{"ranking": [1.5, 2]}',
        '{"ranking": [true, 2]}',
        '{"ranking": [1e999, 2]}',
        '{"order": [1, 2]}',
    ],
)
def test_a_ranking_that_cannot_be_read_twice_is_an_error(reply: str) -> None:
    with (
        ModelServer(lambda request: reply) as server,
        pytest.raises(agl.JudgeError, match="no readable verdict"),
    ):
        asyncio.run(agl.RankingReward(model_of(server)).rank("a task", ["a", "b"]))


@pytest.mark.parametrize("count", [0, 1, 33])
def test_a_group_of_a_wrong_size_is_told(count: int) -> None:
    with pytest.raises(agl.BadRequestError, match=f"requires 2 to 32 answers; got {count}"):
        asyncio.run(agl.RankingReward(lambda messages: "").rank("a task", list(map(str, range(count)))))
