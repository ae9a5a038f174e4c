"""The training ledger over whole runs: every model call ends as trained or excluded, whatever agents and engine do."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.demo.calculator import TOOLS
from agentlightning.engine.completion import Completion
from agentlightning.engine.decoder import Decoder
from agentlightning.errors import NoScoredRolloutError
from agentlightning.training.result import GRPOResult
from agentlightning.training.rollouts import Evidence
from agentlightning.training.rows import LateCalls
from agentlightning.training.run_checks import Endings
from tests.algorithm.parts import ask, calls_of, fit, metrics_of, refused, rollouts_of, say

ENDS: list[Any] = ["good", "better", "raises", "raises", "no call", "none", "nan", "inf", "string", "too long"]


@agl.rollout
def many_ends(task: str, llm: agl.LLM) -> Any:
    """An agent that ends in the way the task names, after one model call or two."""
    end = task.split()[0]
    if end == "no":
        return 1.0
    ask(llm, [say("a")])
    match end:
        case "good" | "better":
            ask(llm, [say("b")])
            return float(end == "better") + _share()
        case "raises":
            raise RuntimeError("the agent broke")
        case "none":
            return None
        case "nan" | "inf":
            return float(end)
        case "string":
            return "a string"
        case _:
            assert refused(llm, [say("1 " * 300)]) == 400
            return _share()


_count = iter(range(1_000_000))


def _share() -> float:
    """A reward that differs from call to call, so that groups have something to compare."""
    return (next(_count) % 7) / 10


async def _run(agent: Any, model: Path, folder: Path, tasks: list[Any], **settings: Any) -> tuple[Any, GRPOResult]:
    store = agl.InMemoryLightningStore()
    settings = {"batch_size": len(tasks), **settings}
    result = await asyncio.to_thread(fit, agent, tasks, store=store, model=model, output_dir=folder, **settings)
    return store, result


async def _reason_of(store: agl.LightningStore, rollout_id: str) -> str | None:
    attempt = await store.get_latest_attempt(rollout_id)
    return None if attempt is None else attempt.outcome_reason


def _assert_balanced(result: GRPOResult) -> None:
    for line in metrics_of(result):
        assert line["calls_captured"] == line["calls_trained"] + sum(line["calls_excluded"].values())


async def test_every_step_adds_up_however_agents_end(untrained_model: Path, tmp_path: Path) -> None:
    tasks = [f"{end} {number}" for number, end in enumerate(ENDS)]
    store, result = await _run(many_ends, untrained_model, tmp_path, tasks)
    _assert_balanced(result)
    calls = await calls_of(store, await rollouts_of(store))
    assert sum(figures.calls_captured for figures in result.metrics) == len(calls)
    # Five tasks of four rollouts raise or return what is no reward; one returns None; one calls in vain.
    expected = {"infrastructure_fault": 20, "no_reward": 4, "upstream_error": 4, "refused_call": 4}
    for figures in result.metrics:
        assert expected.items() <= figures.calls_excluded.items()
        assert figures.calls_trained + figures.calls_excluded.get("equal_rewards", 0) == 8 * 2
        assert figures.rollouts_excluded == {
            "infrastructure_fault": 20,
            "no_call": 4,
            "no_reward": 4,
            "refused_call": 4,
        }


@agl.rollout
def shows_image(task: str, llm: agl.LLM) -> float:
    """An agent whose odd tasks show the policy an image."""
    ask(llm, [say("a")])
    if task.startswith("image"):
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
        assert refused(llm, [{"role": "user", "content": [image]}]) == 400
    return _share()


async def test_a_rollout_that_showed_an_image_is_excluded_and_its_error_names_images(
    untrained_model: Path, tmp_path: Path
) -> None:
    store, result = await _run(shows_image, untrained_model, tmp_path, ["image 1", "words 2"], max_steps=1)
    [figures] = result.metrics
    assert figures.rollouts_excluded == {"refused_call": 4}
    assert figures.calls_trained + figures.calls_excluded.get("equal_rewards", 0) == 4
    seen = [rollout for rollout in await rollouts_of(store) if rollout.input == "image 1"]
    for rollout in seen:
        spans = await store.query_spans(rollout.rollout_id)
        told = [str(value) for span in spans for value in (span.status.description, *span.attributes.values())]
        assert any("images are refused: the rows" in text for text in told)


async def test_a_crash_is_excluded_and_never_a_reward_of_zero(untrained_model: Path, tmp_path: Path) -> None:
    store, result = await _run(many_ends, untrained_model, tmp_path, ["better 1", "raises 2"], max_steps=1)
    [figures] = result.metrics
    assert figures.mean_reward is not None
    assert figures.mean_reward >= 1.0
    assert figures.rollouts_failed == 4
    for rollout in await rollouts_of(store):
        [attempt] = await store.query_attempts(rollout.rollout_id)
        spans = await store.query_spans(rollout.rollout_id)
        if rollout.input == "raises 2":
            assert (attempt.outcome, attempt.error.message) == ("infrastructure_fault", "the agent broke")
            assert "RuntimeError" in attempt.error.traceback
            assert agl.find_final_reward(list(spans)) is None


async def test_the_rest_of_a_group_is_trained_when_some_of_it_crash(untrained_model: Path, tmp_path: Path) -> None:
    crashes = iter([True, False] * 100)

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        reply = ask(llm, [say(task)])["content"]
        if next(crashes):
            raise RuntimeError
        return float(len(reply)) + _share()

    _, result = await _run(agent, untrained_model, tmp_path, ["a"], max_steps=1)
    [figures] = result.metrics
    assert (figures.calls_trained, figures.calls_excluded) == (2, {"infrastructure_fault": 2})


async def test_a_group_of_which_one_is_left_has_nothing_to_compare_with(untrained_model: Path, tmp_path: Path) -> None:
    crashes = iter([True, True, True, False])

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        ask(llm, [say(task)])
        if next(crashes):
            raise RuntimeError
        return 1.0

    _, result = await _run(agent, untrained_model, tmp_path, ["a"], max_steps=1)
    assert result.metrics[0].calls_excluded == {"infrastructure_fault": 3, "no_group": 1}
    assert result.steps == 0


async def test_equal_rewards_teach_nothing_and_take_no_update(untrained_model: Path, tmp_path: Path) -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        ask(llm, [say(task)])
        return 0.5

    _, result = await _run(agent, untrained_model, tmp_path, ["a", "b"])
    assert [figures.calls_excluded for figures in result.metrics] == [{"equal_rewards": 8}] * 2
    assert [figures.mean_reward for figures in result.metrics] == [0.5, 0.5]
    assert result.steps == 0


async def test_a_policy_fault_is_trained_with_the_reward_that_was_said(untrained_model: Path, tmp_path: Path) -> None:
    faults = iter([True, False] * 100)

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        ask(llm, [say(task)])
        if next(faults):
            raise agl.PolicyFault("it said something rude", reward=-1.0)
        return 1.0

    store, result = await _run(agent, untrained_model, tmp_path, ["a"], max_steps=1)
    [figures] = result.metrics
    assert (figures.mean_reward, figures.calls_trained, figures.calls_excluded) == (0.0, 4, {})
    outcomes = Counter([(await store.get_latest_attempt(r.rollout_id)).outcome for r in await rollouts_of(store)])
    assert outcomes == {"scored": 2, "policy_fault": 2}


async def test_a_policy_fault_counts_with_its_reward_in_an_evaluation(untrained_model: Path, tmp_path: Path) -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        if task == "crash":
            raise RuntimeError
        ask(llm, [say(task)])
        raise agl.PolicyFault("almost", reward=0.75)

    settings = {"max_steps": 1, "val_dataset": ["fault", "crash"], "solved_above": 0.5}
    _, result = await _run(agent, untrained_model, tmp_path, ["a"], **settings)
    assert [evaluation.rewards for evaluation in result.evaluations] == [[0.75, None]] * 4
    assert [evaluation.accuracy for evaluation in result.evaluations] == [0.5] * 4
    assert [evaluation.mean_reward for evaluation in result.evaluations] == [0.75] * 4


async def test_an_attempt_that_runs_past_its_limit_is_excluded(
    untrained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Endings, "require_scored", lambda endings: None)  # on a slow machine every rollout is late
    released = threading.Event()

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        ask(llm, [say(task)])
        if task == "hangs":
            released.wait(30)
        return _share()

    settings: dict[str, Any] = {"rollout_timeout_seconds": 1.0, "max_steps": 1, "trainer_runner": _wide_runner()}
    store, result = await _run(agent, untrained_model, tmp_path, ["quick", "hangs"], **settings)
    released.set()
    _assert_balanced(result)
    [figures] = result.metrics
    ended = await rollouts_of(store)
    late = [r.input for r in ended if await _reason_of(store, r.rollout_id) == "timeout"]
    assert late.count("hangs") == 4
    assert figures.rollouts_excluded == {"cancelled": len(late)}
    assert figures.calls_trained <= 8 - len(late)
    counted = figures.calls_captured + sum(result.late_calls.values())
    assert counted == len(await calls_of(store, ended))


async def test_a_call_that_ends_after_its_step_is_excluded_in_a_later_one(
    untrained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Endings, "require_scored", lambda endings: None)  # on a slow machine every rollout is late
    first_step_read = threading.Event()
    decode, expect = Decoder.step, LateCalls.expect

    def decode_when_read(decoder: Decoder) -> list[Completion]:
        first_step_read.wait(30)
        return decode(decoder)

    def expect_and_tell(late: LateCalls, found: Sequence[Evidence], *, in_hand: int) -> None:
        expect(late, found, in_hand=in_hand)
        first_step_read.set()

    monkeypatch.setattr(Decoder, "step", decode_when_read)
    monkeypatch.setattr(LateCalls, "expect", expect_and_tell)

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        ask(llm, [say(task)])
        return _share()

    settings: dict[str, Any] = {"rollout_timeout_seconds": 0.7, "max_steps": 2}
    store, result = await _run(agent, untrained_model, tmp_path, ["a", "b"], trainer_runner=_wide_runner(), **settings)
    _assert_balanced(result)
    calls = await calls_of(store, await rollouts_of(store))
    counted = sum(figures.calls_captured for figures in result.metrics) + sum(result.late_calls.values())
    assert counted == len(calls) > 0
    reasons = Counter(result.late_calls)
    for figures in result.metrics:
        reasons.update(figures.calls_excluded)
    assert reasons["unfinished"] > 0


async def test_a_call_that_the_agent_does_not_wait_for_is_counted_too(untrained_model: Path, tmp_path: Path) -> None:
    threads: list[threading.Thread] = []

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        threads.append(threading.Thread(target=ask, args=(llm, [say(task)])))
        threads[-1].start()
        ask(llm, [say(task)], max_tokens=1)
        return _share()

    store, result = await _run(agent, untrained_model, tmp_path, ["a", "b"], max_steps=3, max_completion_length=200)
    for thread in threads:
        thread.join()
    counted = sum(figures.calls_captured for figures in result.metrics) + sum(result.late_calls.values())
    assert counted == len(await calls_of(store, await rollouts_of(store))) == 2 * 3 * 8


async def test_a_step_does_not_wait_longer_than_its_limit(untrained_model: Path, tmp_path: Path) -> None:
    released = threading.Event()

    @agl.rollout
    def agent(task: str, llm: agl.LLM, rollout: agl.Rollout) -> float:
        ask(llm, [say(task)])
        if task == "hangs" and (rollout.metadata or {})["step"] == 1:
            released.wait(30)
        return _share()

    settings: dict[str, Any] = {
        "step_timeout_seconds": 2.0,
        "rollout_timeout_seconds": 60.0,  # so that it is the step that ends them
        "trainer_runner": _wide_runner(),
    }
    store, result = await _run(agent, untrained_model, tmp_path, ["quick", "hangs"], **settings)
    released.set()
    _assert_balanced(result)
    assert [figures.rollouts_failed for figures in result.metrics] == [4, 0]
    assert result.metrics[0].calls_excluded["cancelled"] == 4
    counted = sum(figures.calls_captured for figures in result.metrics) + sum(result.late_calls.values())
    assert counted == len(await calls_of(store, await rollouts_of(store)))


async def test_attempts_that_hang_do_not_hold_up_the_runner_for_ever(untrained_model: Path, tmp_path: Path) -> None:
    released = threading.Event()

    @agl.rollout
    def agent(task: str, llm: agl.LLM, rollout: agl.Rollout) -> float:
        ask(llm, [say(task)])
        if (rollout.metadata or {})["step"] == 1:
            released.wait(30)
        return _share()

    settings: dict[str, Any] = {"step_timeout_seconds": 2.0, "max_steps": 3, "trainer_runner": None}
    _, result = await _run(agent, untrained_model, tmp_path, ["a"], **settings)
    released.set()
    assert result.metrics[0].rollouts_failed == 4
    assert result.metrics[2].rollouts_done == 4


def _wide_runner() -> dict[str, Any]:
    return {"type": "agentlightning.LitAgentRunner", "concurrency": 16}


def test_a_step_without_any_reward_is_told_with_its_commonest_cause(
    untrained_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        raise ConnectionError("the database is down")

    with pytest.raises(NoScoredRolloutError, match="the database is down"):
        fit(agent, ["a"], model=untrained_model, output_dir=tmp_path, max_steps=1, progress="plain")
    told = capsys.readouterr().out
    assert "none of 4 rollouts has a reward to learn from" in told
    assert "ConnectionError: the database is down (4 of 4)" in told


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
async def test_a_reward_that_is_no_number_never_reaches_the_advantages(
    untrained_model: Path, tmp_path: Path, reward: float
) -> None:
    rewards = iter([reward, 0.0, 1.0, 1.0])

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        ask(llm, [say(task)])
        return next(rewards)

    _, result = await _run(agent, untrained_model, tmp_path, ["a"], max_steps=1)
    [figures] = result.metrics
    assert figures.mean_reward == pytest.approx(2 / 3)
    assert (figures.calls_trained, figures.calls_excluded) == (3, {"infrastructure_fault": 1})


@pytest.mark.parametrize("grammar", [False, True])
async def test_the_ledger_says_which_trained_calls_were_constrained_and_their_first_ratio_is_one(
    untrained_model: Path, tmp_path: Path, grammar: bool
) -> None:
    calculator: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
    if grammar:
        pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'agl-framework[grpo]'")

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        ask(llm, [say(task)], top_p=0.5, logit_bias={"20": 3}, stop=["8"])
        ask(llm, [say(task)], **(calculator if grammar else {}))
        return _share()

    _, result = await _run(agent, untrained_model, tmp_path, ["a"], max_steps=1)
    [line] = metrics_of(result)
    assert line["calls_trained"] == 8
    assert line["calls_constrained"] == {"logit_bias": 4, "top_p": 4, **({"tool_choice": 4} if grammar else {})}
    assert line["update"]["first_ratio_error"] < 1e-3
