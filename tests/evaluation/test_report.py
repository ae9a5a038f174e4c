"""Conversations won and lost: the selection, and their text. The page itself: tests/cli/test_promotion.py."""

from __future__ import annotations

import pytest
from opentelemetry import trace

import agentlightning as agl
from agentlightning.evaluation.report import Transcript, changed_tasks, transcripts
from agentlightning.evaluation.result import EvaluatedRollout, EvaluatedTask

Messages = list[tuple[str, str]]


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


async def transcript_of(*calls: Messages) -> Transcript:
    """Run an agent that makes these calls, each with its prompt and its answer, and return its transcript."""

    @agl.rollout
    def agent(task: dict[str, str]) -> float:
        for *prompt, (role, text) in calls:
            with trace.get_tracer("agent").start_as_current_span("openai.chat.completion") as span:
                for place, (own, content) in enumerate(prompt):
                    span.set_attributes({f"gen_ai.prompt.{place}.role": own, f"gen_ai.prompt.{place}.content": content})
                span.set_attributes({"gen_ai.completion.0.role": role, "gen_ai.completion.0.content": text})
        return 1.0

    store = agl.InMemoryLightningStore()
    runner = agl.LitAgentRunner(agl.OtelTracer())
    with runner.run_context(agent=agent, store=store) as ready:
        rollout = await ready.step({"question": "x" * 3000}, resources={})
    transcripts_by_id = await transcripts(store, [rollout.rollout_id, "ro-none", ""])
    assert transcripts_by_id["ro-none"].note == "the rollout is not in the store"
    assert transcripts_by_id[""].note == "the record has no rollout id"
    return transcripts_by_id[rollout.rollout_id]


async def test_each_message_is_shown_once() -> None:
    first = [("system", "be brief"), ("user", "hello"), ("assistant", "hi")]
    transcript = await transcript_of(first, [*first, ("user", "more"), ("assistant", "no")])
    assert transcript.messages == (*first, ("user", "more"), ("assistant", "no"))
    assert transcript.task.endswith(" characters)")
    assert len(transcript.task) < 2100


async def test_a_secret_at_the_cut_is_hidden_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "correct-horse-battery")
    text = "y" * 3990 + "correct-horse-battery" + "z" * 100
    transcript = await transcript_of([("user", text), ("assistant", "ok")])
    assert "corr" not in str(transcript)
    assert len(transcript.messages[0][1]) < 4100


async def test_the_middle_of_very_many_messages_is_not_shown() -> None:
    transcript = await transcript_of([*(("user", str(number)) for number in range(100)), ("assistant", "end")])
    assert (len(transcript.messages), transcript.messages[-1]) == (40, ("assistant", "end"))
    assert transcript.note == "not shown: 61 messages in the middle"


async def test_a_rollout_without_calls_says_so() -> None:
    transcript = await transcript_of()
    assert (transcript.messages, transcript.note) == ((), "no model call with text is recorded")
