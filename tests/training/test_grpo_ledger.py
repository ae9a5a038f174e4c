"""The ledger of runs whose calls and attempts end late, are refused, or are constrained."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.demo.calculator import TOOLS
from agentlightning.engine.completion import Completion
from agentlightning.engine.decoder import Decoder
from agentlightning.training.rollouts import Evidence
from agentlightning.training.rows import LateCalls
from agentlightning.training.run_checks import Endings
from tests.algorithm.parts import ask, refused, say
from tests.training.conformance.cases import GRPO, Books, assert_complete, fit, read, stored

_count = itertools.count()
WIDE = {"type": "agentlightning.LitAgentRunner", "concurrency": 16}


def share() -> float:
    """Return a reward that differs from call to call, so that groups have something to compare."""
    return (next(_count) % 7) / 10


def run(agent: Any, model: Path, folder: Path, tasks: list[Any], *, max_steps: int = 1, **settings: Any) -> Books:
    """Train, check that the ledger has every call once, and return the books."""
    settings = {"batch_size": len(tasks), "deterministic": False, **settings}
    fit(GRPO, agent, model, folder, tasks=tasks, max_steps=max_steps, **settings)
    books = read(folder)
    assert_complete(books, max_steps)
    return books


def test_a_rollout_that_showed_an_image_is_excluded_and_its_error_names_images(
    untrained_model: Path, tmp_path: Path
) -> None:
    @agl.rollout
    def shows_image(task: str, llm: agl.LLM) -> float:
        ask(llm, [say("a")])
        if task == "image":
            image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
            assert refused(llm, [{"role": "user", "content": [image]}]) == 400
        return share()

    books = run(shows_image, untrained_model, tmp_path, ["image", "words"])
    [line] = books.lines
    assert line["rollouts_excluded"] == {"refused_call": 4}
    assert line["calls_trained"] + line["calls_excluded"].get("equal_rewards", 0) == 4
    for rollout in books.rollouts:
        if rollout.input == "image":
            spans = stored(tmp_path, lambda store, one=rollout: store.query_spans(one.rollout_id))
            texts = [str(value) for span in spans for value in (span.status.description, *span.attributes.values())]
            assert any("images are not supported: the policy" in text for text in texts)


def test_a_policy_fault_counts_with_its_reward_in_an_evaluation(untrained_model: Path, tmp_path: Path) -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        if task == "crash":
            raise RuntimeError
        ask(llm, [say(task)])
        raise agl.PolicyFault("almost", reward=0.75)

    settings: dict[str, Any] = {"max_steps": 1, "eval_steps": 0, "solved_above": 0.5}
    result = fit(GRPO, agent, untrained_model, tmp_path, tasks=["a"], held_out=["fault", "crash"], **settings)
    figures = [(evaluation.rewards, evaluation.accuracy, evaluation.mean_reward) for evaluation in result.evaluations]
    assert figures == [([0.75, None], 0.5, 0.75)] * 4


def test_an_attempt_that_runs_past_its_limit_is_excluded(
    untrained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Endings, "require_scored", lambda endings: None)  # on a slow machine every rollout is late
    released = threading.Event()

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        ask(llm, [say(task)])
        if task == "hangs":
            released.wait(30)
        return share()

    settings: dict[str, Any] = {"rollout_timeout_seconds": 1.0, "trainer_runner": WIDE}
    books = run(agent, untrained_model, tmp_path, ["quick", "hangs"], **settings)
    released.set()
    attempts = [stored(tmp_path, lambda s, one=r: s.get_latest_attempt(one.rollout_id)) for r in books.rollouts]
    reasons = [None if attempt is None else attempt.outcome_reason for attempt in attempts]
    late = [r.input for r, reason in zip(books.rollouts, reasons, strict=True) if reason == "timeout"]
    assert late.count("hangs") == 4
    assert books.lines[0]["rollouts_excluded"] == {"cancelled": len(late)}
    assert books.lines[0]["calls_trained"] <= 8 - len(late)


def test_a_call_that_ends_after_its_step_is_excluded_in_a_later_one(
    untrained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Endings, "require_scored", lambda endings: None)  # on a slow machine every rollout is late
    first_step_read = threading.Event()
    decode, expect = Decoder.step, LateCalls.expect

    def decode_when_read(decoder: Decoder) -> list[Completion]:
        first_step_read.wait(30)
        return decode(decoder)

    def expect_and_tell(late: LateCalls, ledger: Sequence[Evidence], *, in_hand: int) -> None:
        expect(late, ledger, in_hand=in_hand)
        first_step_read.set()

    monkeypatch.setattr(Decoder, "step", decode_when_read)
    monkeypatch.setattr(LateCalls, "expect", expect_and_tell)

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        ask(llm, [say(task)])
        return share()

    settings: dict[str, Any] = {"rollout_timeout_seconds": 0.7, "trainer_runner": WIDE}
    books = run(agent, untrained_model, tmp_path, ["a", "b"], max_steps=2, **settings)
    assert "unfinished" in {call["reason"] for call in books.endings()}


def test_a_call_that_the_agent_does_not_wait_for_is_counted_too(untrained_model: Path, tmp_path: Path) -> None:
    threads: list[threading.Thread] = []

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        threads.append(threading.Thread(target=ask, args=(llm, [say(task)])))
        threads[-1].start()
        ask(llm, [say(task)], max_tokens=1)
        return share()

    books = run(agent, untrained_model, tmp_path, ["a", "b"], max_steps=3, max_completion_length=200)
    for thread in threads:
        thread.join()
    assert len(books.calls) == 2 * 3 * 8


@pytest.mark.parametrize("runner", [WIDE, None])
def test_a_step_does_not_wait_longer_than_its_limit(untrained_model: Path, tmp_path: Path, runner: Any) -> None:
    released = threading.Event()

    @agl.rollout
    def agent(task: str, llm: agl.LLM, rollout: agl.Rollout) -> float:
        ask(llm, [say(task)])
        if task == "hangs" and (rollout.metadata or {})["step"] == 1:
            released.wait(30)
        return share()

    settings: dict[str, Any] = {"step_timeout_seconds": 2.0, "trainer_runner": runner}
    if runner:
        settings["rollout_timeout_seconds"] = 60.0  # so that it is the step that ends them
    tasks = ["quick", "hangs"] if runner else ["hangs"]  # without, one runner must let go of what hangs
    books = run(agent, untrained_model, tmp_path, tasks, max_steps=3, **settings)
    released.set()
    hung = [rollout for rollout in books.rollouts if rollout.input == "hangs" and (rollout.metadata or {})["step"] == 1]
    assert [rollout.status in ("cancelled", "failed") for rollout in hung] == [True] * 4
    assert "cancelled" in books.lines[0]["calls_excluded"]
    assert sum(line["rollouts_done"] for line in books.lines[1:]) > 0, "on a busy machine some are late, too"


@pytest.mark.parametrize("grammar", [False, True])
def test_the_ledger_says_which_trained_calls_were_constrained_and_their_first_ratio_is_one(
    untrained_model: Path, tmp_path: Path, grammar: bool
) -> None:
    calculator: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
    if grammar:
        pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'agl-framework[grpo]'")

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        ask(llm, [say(task)], top_p=0.5, logit_bias={"20": 3}, stop=["8"])
        ask(llm, [say(task)], **(calculator if grammar else {}))
        return share()

    [line] = run(agent, untrained_model, tmp_path, ["a"]).lines
    assert line["calls_trained"] == 8
    assert line["calls_constrained"] == {"logit_bias": 4, "top_p": 4, **({"tool_choice": 4} if grammar else {})}
    assert line["update"]["first_ratio_error"] < 1e-3
