"""Conversations won and lost: which are shown, and what is left of them."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry import trace

import agentlightning as agl
from agentlightning.evaluation.conversations import changed_tasks, transcripts
from agentlightning.evaluation.result import EvaluatedRollout, EvaluatedTask


def task(number: int, *rewards: float | None) -> EvaluatedTask:
    rollouts = (EvaluatedRollout(f"{number}-{place}", "", reward, 1.0) for place, reward in enumerate(rewards))
    return EvaluatedTask(number, tuple(rollouts))


def test_those_whose_reward_differs_most_are_shown_with_the_samples_that_tell_most() -> None:
    pairs = [(task(n, n / 20, 0.0, None), task(n, 1.0, 0.5)) for n in range(20)]
    pairs += [(task(99, 1.0), task(99, 0.0)), (task(98, None), task(98, 0.0)), (task(97, 0.5), task(97, 0.5))]
    won, lost = changed_tasks(pairs, most=3)
    shown = [(each.before.rollout_id, each.after.rollout_id) for each in won]
    assert shown == [("0-0", "0-0"), ("1-1", "1-0"), ("2-1", "2-0")]
    assert [each.before.rollout_id for each in lost] == ["99-0"]


def speak(calls: list[list[tuple[str, str]]]) -> None:
    for messages in calls:
        with trace.get_tracer("agent").start_as_current_span("openai.chat.completion") as span:
            for place, (role, text) in enumerate(messages[:-1]):
                span.set_attributes({f"gen_ai.prompt.{place}.role": role, f"gen_ai.prompt.{place}.content": text})
            role, text = messages[-1]
            span.set_attributes({"gen_ai.completion.0.role": role, "gen_ai.completion.0.content": text})


async def told(calls: list[list[tuple[str, str]]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run an agent that says this, and return the transcript of its rollout."""
    monkeypatch.setenv("SOME_API_KEY", "correct-horse-battery")

    @agl.rollout
    def agent(task: dict[str, str]) -> float:
        speak(calls)
        return 1.0

    store = agl.InMemoryLightningStore()
    runner = agl.LitAgentRunner(agl.OtelTracer())
    with runner.run_context(agent=agent, store=store) as ready:
        rollout = await ready.step({"question": "x" * 3000}, resources={})
    found = await transcripts(store, [rollout.rollout_id, "ro-none", ""])
    assert found["ro-none"].note == "the store has no such rollout"
    assert found[""].note == "the record names no rollout"
    return found[rollout.rollout_id]


async def test_what_was_said_before_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = [("system", "be brief"), ("user", "hello"), ("assistant", "hi")]
    found = await told([first, [*first, ("user", "more"), ("assistant", "no")]], monkeypatch)
    assert found.messages == (*first, ("user", "more"), ("assistant", "no"))
    assert found.task.endswith(" characters)")
    assert len(found.task) < 2100


async def test_a_secret_at_the_cut_is_hidden_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "y" * 3990 + "correct-horse-battery" + "z" * 100
    found = await told([[("user", text), ("assistant", "ok")]], monkeypatch)
    assert "corr" not in str(found)
    assert len(found.messages[0][1]) < 4100


async def test_of_very_many_messages_the_middle_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await told([[("user", str(number)) for number in range(100)] + [("assistant", "end")]], monkeypatch)
    assert len(found.messages) == 40
    assert found.messages[-1] == ("assistant", "end")
    assert found.note == "61 messages in the middle are left out"


async def test_a_rollout_without_calls_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await told([], monkeypatch)
    assert found.messages == ()
    assert found.note == "no model call was recorded with its text"
