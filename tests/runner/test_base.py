"""A runner as a context, and the errors for settings that belong elsewhere."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.emitter import emit_reward, find_final_reward
from agentlightning.litagent import rollout
from agentlightning.runner import LitAgentRunner
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.otel import OtelTracer
from agentlightning.types import Hook


def agent(task: float) -> float:
    return task


async def test_a_context_tears_down_what_was_initialised_within_it() -> None:
    store, runner = agl.InMemoryLightningStore(), agl.LitAgentRunner[Any](tracer=agl.OtelTracer())
    for reward in (0.5, 1.0):
        async with runner as same:
            assert same is runner
            runner.init(agent=agent)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType] -- wrapped
            runner.init_worker(worker_id=0, store=store)
            done = await runner.step(reward, resources={})
            assert agl.find_final_reward(await store.query_spans(done.rollout_id)) == reward
        assert runner.worker_id is None
        with pytest.raises(ValueError, match=r"Call init\(\) first"):
            runner.get_agent()


async def test_a_context_in_which_nothing_or_half_was_initialised_ends_too(caplog: pytest.LogCaptureFixture) -> None:
    runner = agl.LitAgentRunner[Any](tracer=agl.OtelTracer())
    async with runner:
        pass

    async def half() -> None:
        async with runner:
            runner.init(agent=agent)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType] -- wrapped
            raise LookupError("of the body")

    with pytest.raises(LookupError, match="of the body"):
        await half()
    with pytest.raises(ValueError, match=r"Call init\(\) first"):
        runner.get_agent()
    assert caplog.text == ""


def test_agent_and_store_in_the_place_of_a_tracer_are_told_where_they_go() -> None:
    store: Any = agl.InMemoryLightningStore()
    for runner in (agl.Runner, agl.LitAgentRunner):
        make: Any = runner
        with pytest.raises(TypeError, match=r"run_context\(agent=agent, store=store\)"):
            make(agent, store)


class Noting(Hook):
    def __init__(self, name: str, notes: list[str]) -> None:
        super().__init__()
        self.name, self.notes = name, notes

    async def on_rollout_start(self, **about: Any) -> None:
        self.notes.append(f"{self.name} rollout start {sorted(about)}")

    async def on_trace_start(self, **about: Any) -> None:
        self.notes.append(f"{self.name} trace start {sorted(about)}")

    async def on_trace_end(self, **about: Any) -> None:
        self.notes.append(f"{self.name} trace end {sorted(about)}")

    async def on_rollout_end(self, **about: Any) -> None:
        self.notes.append(f"{self.name} rollout end {sorted(about)}")


async def test_hooks_are_called_in_order_and_in_reverse_at_the_ends(serve: Any) -> None:
    notes: list[str] = []
    await serve(rollout(lambda task: 1.0), "x", hooks=[Noting("a", notes), Noting("b", notes)])
    keys, traced = "['agent', 'rollout', 'runner']", "['agent', 'rollout', 'runner', 'tracer']"
    assert notes == [
        f"a rollout start {keys}",
        f"b rollout start {keys}",
        f"a trace start {traced}",
        f"b trace start {traced}",
        f"b trace end {traced}",
        f"a trace end {traced}",
        "b rollout end ['agent', 'rollout', 'runner', 'spans']",
        "a rollout end ['agent', 'rollout', 'runner', 'spans']",
    ]


async def test_a_hook_may_take_less_and_be_synchronous(store: InMemoryLightningStore, serve: Any) -> None:
    inputs: list[Any] = []

    class Small(Hook):
        def on_rollout_start(self, rollout: Any) -> None:  # type: ignore[override] -- the small form
            inputs.append(rollout.input)

        def on_rollout_end(self, *, spans: Any) -> None:  # type: ignore[override] -- the small form
            inputs.append(find_final_reward(spans))

    await serve(rollout(lambda task: 0.5), "x", hooks=[Small()])
    assert inputs == ["x", 0.5]


async def test_the_spans_at_the_end_have_their_numbers_and_the_reward(serve: Any) -> None:
    contents: list[Any] = []

    class Looking(Hook):
        async def on_rollout_end(self, *, rollout: Any, spans: Any, **_: Any) -> None:
            contents.append([(span.sequence_id, find_final_reward([span])) for span in spans])
            contents.append(rollout.status)

    @rollout
    def agent(task: str) -> float:
        emit_reward(0.1)
        return 0.9

    await serve(agent, "x", hooks=[Looking()])
    assert contents == [[(1, 0.1), (2, 0.9)], "preparing"]


async def test_a_failing_hook_is_logged_and_changes_nothing(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    notes: list[str] = []

    class Failing(Hook):
        async def on_rollout_start(self, **_: Any) -> None:
            raise RuntimeError("start")

        def on_trace_end(self, **_: Any) -> None:  # type: ignore[override] -- synchronous
            raise RuntimeError("end")

        async def on_rollout_end(self, **_: Any) -> None:
            raise RuntimeError("last")

    with caplog.at_level(logging.ERROR):
        (finished,) = await serve(rollout(lambda task: 1.0), "x", hooks=[Failing(), Noting("b", notes)])
    assert finished.attempt.outcome == "scored"
    assert len(notes) == 4
    for callback in ("on_rollout_start", "on_trace_end", "on_rollout_end"):
        assert f"Exception during {callback} hook of Failing" in caplog.text


async def test_on_failure_the_error_is_told_and_the_end_is_called(serve: Any) -> None:
    calls: list[Any] = []

    class Looking(Hook):
        async def on_rollout_error(self, *, error: BaseException) -> None:
            calls.append(type(error))

        async def on_trace_end(self, **_: Any) -> None:
            raise AssertionError("the agent did not return")

        async def on_rollout_end(self, *, spans: Any, **_: Any) -> None:
            calls.append(len(spans))

    @rollout
    def agent(task: str) -> float:
        emit_reward(0.1)
        raise KeyError("x")

    await serve(agent, "x", hooks=[Looking()])
    assert calls == [KeyError, 1]


async def test_a_hook_may_score_within_the_trace(serve: Any) -> None:
    class Scoring(Hook):
        async def on_trace_end(self, **_: Any) -> None:
            emit_reward(0.7)

    (finished,) = await serve(rollout(lambda task: None), "x", hooks=[Scoring()])
    assert finished.attempt.outcome == "scored"


def test_what_is_no_hook_is_refused_by_name(store: InMemoryLightningStore) -> None:
    runner: LitAgentRunner[Any] = LitAgentRunner(OtelTracer())
    with pytest.raises(TypeError, match=r"A hook must be an object of a subclass of agl\.Hook; got 3"):
        runner.init(rollout(lambda task: 1.0), hooks=[3])  # type: ignore[list-item] -- the mistake under test


def test_a_hook_that_asks_for_what_it_is_not_told_is_refused_at_once() -> None:
    class Greedy(Hook):
        async def on_rollout_end(self, rollout: Any, score: float) -> None:  # type: ignore[override] -- the mistake
            raise AssertionError

    runner: LitAgentRunner[Any] = LitAgentRunner(OtelTracer())
    with pytest.raises(
        TypeError,
        match=r"Greedy\.on_rollout_end has the unknown arguments score; available by name: agent, rollout, runner, spa",
    ):
        runner.init(rollout(lambda task: 1.0), hooks=[Greedy()])
