"""Whole runs whose rewards are given to the rollouts of a task together."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.cli.main import main
from agentlightning.training.group_rewards import with_group_rewards
from agentlightning.training.rollouts import Evidence
from tests.algorithm.parts import ask, fit, metrics_of, rollouts_of, say
from tests.chat.test_judge import between, model_of, said
from tests.stubs.model_server import ModelServer

BASE: dict[str, Any] = {"max_steps": 1, "batch_size": 2, "num_generations": 4}


@agl.rollout
def says_something(task: str, llm: agl.LLM) -> None:
    """An agent without a reward of its own."""
    ask(llm, [say(task)])


def lines_of(model: Path, folder: Path, **settings: Any) -> list[dict[str, Any]]:
    """Run two tasks and return the metrics of each step."""
    settings = {**BASE, "model": model, "output_dir": folder / "run", **settings}
    return metrics_of(fit(says_something, ["first", "second"], **settings))


def by_words(request: dict[str, Any]) -> str:
    shown = between("answer", said(request))
    ranking = sorted(range(1, len(shown) + 1), key=lambda place: shown[place - 1])
    return json.dumps({"ranking": ranking})


async def test_a_judge_ranks_the_rollouts_of_each_task_and_one_of_them_has_its_questions(
    untrained_model: Path, tmp_path: Path
) -> None:
    store = agl.InMemoryLightningStore()
    with ModelServer(by_words) as server:
        reward = agl.RankingReward(model_of(server), keep="all", prices={"judge": (1.0, 1.0)})
        [line] = await asyncio.to_thread(lines_of, untrained_model, tmp_path, store=store, group_reward=reward)
        assert len(server.calls) == 4, "two groups, each in two orders"
        [task] = between("task", said(server.calls[0].request))
        assert task in ("first", "second")
        assert '"role": "assistant"' in between("answer", said(server.calls[0].request))[0]
    assert line["calls_trained"] == 8
    assert line["mean_reward"] == pytest.approx(0.5)
    groups: list[list[dict[str, Any]]] = []
    for rollout in await rollouts_of(store):
        assert rollout.status == "succeeded"
        spans = [dict(span.attributes) for span in await store.query_spans(rollout.rollout_id)]
        groups.append([attributes for attributes in spans if "judge.purpose" in attributes])
    assert sorted(map(len, groups)) == [0] * 6 + [2] * 2
    notes = [note for group in groups for note in group]
    assert sum(note["judge.cost"] for note in notes) == pytest.approx(reward.bill.cost)
    assert sum(note["judge.prompt_tokens"] for note in notes) == reward.bill.prompt_tokens
    assert all("You rank" in note["judge.prompt"] and '"ranking"' in note["judge.reply"] for note in notes)


async def test_a_group_whose_judge_fails_is_not_trained_and_an_alarm_tells(
    untrained_model: Path, tmp_path: Path
) -> None:
    store = agl.InMemoryLightningStore()

    def only_the_first(request: dict[str, Any]) -> str:
        return by_words(request) if between("task", said(request)) == ["first"] else "Hm."

    with ModelServer(only_the_first) as server:
        ranking = agl.RankingReward(model_of(server))
        [line] = lines_of(untrained_model, tmp_path, store=store, trainer_run_id="run-j", group_reward=ranking)
    assert line["calls_trained"] == 4
    assert line["calls_excluded"] == {"no_reward": 4}
    rollouts = await rollouts_of(store)
    assert len(rollouts) == 8
    attempts = [attempt for each in rollouts for attempt in await store.query_attempts(each.rollout_id)]
    counts = Counter((attempt.outcome, attempt.outcome_reason, attempt.reward is None) for attempt in attempts)
    assert counts == {("scored", "group_reward", False): 4, ("unscored", "not_judged", True): 4}
    alarms = [record for record in await store.query_run_records("run-j") if record.kind == "alarm"]
    assert [alarm.name for alarm in alarms] == ["not_judged"]
    assert "no reward for 4 rollouts of 1 task, because they were not judged" in alarms[0].data["text"]


async def test_held_out_tasks_that_no_group_rewards_are_told_of(untrained_model: Path, tmp_path: Path) -> None:
    store = agl.InMemoryLightningStore()
    settings: dict[str, Any] = {"val_dataset": ["third"], "store": store, "trainer_run_id": "run-h"}
    await asyncio.to_thread(lines_of, untrained_model, tmp_path, group_reward=by_letters, **settings)
    alarms = [record for record in await store.query_run_records("run-h") if record.kind == "alarm"]
    assert [alarm.data["text"][:40] for alarm in alarms if alarm.name == "held_out_without_reward"] == [
        "No held-out rollout has a reward: group_"
    ] * 2, "before and after"


def test_rewards_that_are_none_end_the_run_with_what_was_given(untrained_model: Path, tmp_path: Path) -> None:
    with pytest.raises(agl.BadRequestError, match=r"must return 4 finite numbers, one per answer; it returned \[1.0\]"):
        lines_of(untrained_model, tmp_path, group_reward=lambda task, answers: [1.0])
    with pytest.raises(TypeError, match="group_reward must be an agl"):
        agl.GRPO(untrained_model, group_reward=0.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(agl.BadRequestError, match="num_generations=33: a judge can rank at most 32 answers per task"):
        agl.GRPO(untrained_model, num_generations=33, group_reward=agl.RankingReward(lambda messages: ""))


@pytest.mark.parametrize("worst", [1e308, -1e16, 10**400, float("nan")])
async def test_a_number_that_is_no_reward_is_refused(worst: float) -> None:
    with pytest.raises(agl.BadRequestError, match=r"Each must be a finite number of at most 1e\+15 in magnitude"):
        await rewarded(lambda task, answers: [worst] * len(answers), [ended("a")], [0])


def test_a_policy_fault_keeps_its_reward_and_groups_of_equal_rewards_are_sampled_again(
    untrained_model: Path, tmp_path: Path
) -> None:
    judged: list[tuple[str, int]] = []

    @agl.rollout
    def fails_at_times(task: str, llm: agl.LLM, rollout: agl.Rollout) -> float:
        ask(llm, [say(task)])
        if (rollout.metadata or {}).get("sample") == 0:
            raise agl.PolicyFault("no answer", reward=-1.0)
        return 5.0

    def equal_at_first(task: Any, answers: Sequence[Any]) -> list[float]:
        judged.append((task, len(answers)))
        return [-1.0 if len(judged) == 1 else place / 10 for place in range(len(answers))]

    settings = {**BASE, "model": untrained_model, "output_dir": tmp_path / "run", "batch_size": 1}
    result = fit(fails_at_times, ["a", "b", "c"], group_reward=equal_at_first, max_num_gen_batches=3, **settings)
    [line] = metrics_of(result)
    assert [count for _, count in judged] == [3, 3]
    assert len({task for task, _ in judged}) == 2
    assert (line["calls_captured"], line["calls_trained"]) == (8, 4)
    assert line["calls_excluded"] == {"equal_rewards": 4}
    assert line["mean_reward"] == pytest.approx((-1.0 + 0.0 + 0.1 + 0.2) / 4)


def ended(task: str, words: str | None = "hello", **fields: Any) -> Evidence:
    """Return what a store holds of a rollout that succeeded; without words there is no call."""
    id = f"ro-{task}-{words}"
    rollout = agl.Rollout(rollout_id=id, input=task, start_time=0.0, status="succeeded", mode="train")
    attempt: dict[str, Any] = {"outcome": "unscored", "status": "succeeded", **fields}
    attributes = {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": task}
    attributes |= {"gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": words or ""}
    span = agl.Span.from_attributes(
        attributes=attributes, rollout_id=id, attempt_id="at-1", sequence_id=1, name="openai.chat.completion"
    )
    only_attempt = agl.Attempt(rollout_id=id, attempt_id="at-1", sequence_id=1, start_time=0.0, **attempt)
    return Evidence(rollout, [only_attempt], [] if words is None else [span])


async def rewarded(judge: Any, evidence: list[Evidence], groups: list[int]) -> tuple[list[float | None], list[str]]:
    notes: list[str] = []
    judged, _ = await with_group_rewards(judge, evidence, groups, notes.append)
    return [one.reward for one in judged], notes


async def test_a_function_may_give_the_rewards_and_a_plain_one_does_not_hold_up_the_loop() -> None:
    event = threading.Event()

    def waits(task: object, answers: Sequence[Any]) -> list[float]:
        assert event.wait(30.0)
        return [float(len(answer[0]["content"])) for answer in answers]

    async def lengths(task: object, answers: Sequence[Any]) -> list[float]:
        return [float(len(answer[0]["content"])) for answer in answers]

    asyncio.get_running_loop().call_later(0.01, event.set)
    rollouts = [ended("a"), ended("a", "bye"), ended("b"), ended("c")]
    for function in (waits, lengths):  # late rollouts, whose number is -1, are in no group
        assert await rewarded(function, rollouts, [0, 0, -1, -1]) == ([5.0, 3.0, None, None], [])


async def test_groups_that_are_not_judged_are_reported_once_and_their_own_rewards_do_not_count() -> None:
    with ModelServer(lambda request: "Hm.") as server:
        evidence = [ended(task, words) for task in "abc" for words in ("hello", "bye")]
        rewards, [note] = await rewarded(agl.RankingReward(model_of(server)), evidence, [0, 0, 1, 1, 2, 2])
    assert rewards == [None] * 6
    assert note.startswith("no reward for 6 rollouts of 3 tasks, because they were not judged: The judge returned no")
    ranking = agl.RankingReward(lambda messages: "")
    rewards, [note] = await rewarded(ranking, [ended("a", None), ended("a", None)], [0, 0])
    assert rewards == [None, None]
    assert note.endswith("because they were not judged: none of their replies was recorded as text")


def by_letters(task: object, answers: Sequence[Any]) -> list[float]:
    return [float(sum(map(ord, answer[0]["content"]))) for answer in answers]


@pytest.mark.parametrize(
    ("judge", "name"),
    [
        (by_letters, "tests.training.test_group_rewards.by_letters"),
        (functools.partial(by_letters, key="a secret"), "functools.partial"),
        (agl.RankingReward(model="judge"), "RankingReward(model='judge', orders=2)"),
    ],
)
def test_the_run_records_who_gave_the_rewards(untrained_model: Path, judge: Any, name: str) -> None:
    assert agl.GRPO(untrained_model, group_reward=judge).recorded_settings()["group_reward"] == name


@pytest.mark.heavy
def test_a_run_with_rewards_of_groups_goes_on_as_if_it_had_not_ended(untrained_model: Path, tmp_path: Path) -> None:
    curves: list[list[tuple[Any, ...]]] = []
    for place, steps in (("whole", [2]), ("parts", [1, 2])):
        for most in steps:
            settings = {**BASE, "model": untrained_model, "output_dir": tmp_path / place, "deterministic": True}
            settings |= {"max_steps": most, "store": agl.SQLiteLightningStore(tmp_path / f"{place}.db")}
            tasks = ["a", "b", "c"]
            result = fit(says_something, tasks, trainer_run_id="r", group_reward=by_letters, **settings)
        curves.append([(line["step"], line["weights"], line["calls_trained"]) for line in metrics_of(result)])
    assert curves[0] == curves[1]
    assert main(["runs", "ledger", "r", "--check", "--store", str(tmp_path / "parts.db")]) == 0
