"""A runner as a context, and what says that its settings belong elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

import agentlightning as agl


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
