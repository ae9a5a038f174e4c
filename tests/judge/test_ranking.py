"""Rewards by rank: ties, the order of the answers, and verdicts that cannot be read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

import agentlightning as agl
from tests.judge.test_judge import between, model_of, said
from tests.stubs.model_server import ModelServer


def by_length(request: dict[str, Any]) -> str:
    """Rank answers by their length, equally long ones alike."""
    shown = between("answer", said(request))
    lengths = sorted({len(answer) for answer in shown})
    levels = [[place for place, answer in enumerate(shown, start=1) if len(answer) == length] for length in lengths]
    return f"Shorter is better. {json.dumps({'ranking': levels})}"


def test_places_are_rewards_and_equal_ones_share_them() -> None:
    with ModelServer(by_length) as server:
        ranking = asyncio.run(agl.RankingReward(model_of(server)).rank("a task", ["ccc", "a", "bb", "dd", "a"]))
    assert ranking.rewards == (0.0, 1.0, 0.5, 0.5, 1.0)
    assert ranking.ties == 2
    assert ranking.position_bias == 0.0
    assert ranking.bill.calls == 2
    first, second = (between("answer", said(call.request)) for call in server.calls)
    assert first == second[::-1]


def test_a_judge_that_likes_the_first_place_gives_equal_rewards_and_is_found_out() -> None:
    with ModelServer(lambda request: '{"ranking": [1, 2, 3]}') as server:
        ranking = asyncio.run(agl.RankingReward(model_of(server)).rank("a task", ["a", "b", "c"]))
    assert ranking.rewards == (0.5, 0.5, 0.5)
    assert ranking.position_bias == 1.0


def test_equal_answers_are_not_asked_about() -> None:
    with ModelServer(by_length) as server:
        ranking = asyncio.run(agl.RankingReward(model_of(server)).rank("a task", ["a", "a", "a"]))
    assert (ranking.rewards, ranking.ties, server.calls) == ((0.5, 0.5, 0.5), 3, [])


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
        pytest.raises(agl.JudgeError, match="no verdict that can be read"),
    ):
        asyncio.run(agl.RankingReward(model_of(server)).rank("a task", ["a", "b"]))


@pytest.mark.parametrize("count", [0, 1, 33])
def test_a_group_of_a_wrong_size_is_told(count: int) -> None:
    with pytest.raises(agl.BadRequestError, match=f"needs 2 to 32 answers; there are {count}"):
        asyncio.run(agl.RankingReward(lambda messages: "").rank("a task", list(map(str, range(count)))))
