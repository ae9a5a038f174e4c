"""The runner works with a tracer of the user's own, which keeps its spans to itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from typing_extensions import override

from agentlightning.emitter import emit_message
from agentlightning.litagent import rollout
from agentlightning.runner import LitAgentRunner
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.base import with_active_tracer_context
from agentlightning.tracer.dummy import DummyTracer
from agentlightning.types import AttemptedRollout


class OwnTracer(DummyTracer):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @override
    @with_active_tracer_context
    @asynccontextmanager
    async def trace_context(self, name: str | None = None, **ids: Any) -> AsyncIterator[None]:
        self.names.append(str(ids["rollout_id"]))
        yield

    @override
    def create_span(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.names.append(name)
        return super().create_span(name, *args, **kwargs)


async def test_the_returned_reward_is_stored_whatever_the_tracer_keeps(store: InMemoryLightningStore) -> None:
    @rollout
    def agent(task: str) -> float:
        emit_message("heard by the tracer")
        return 0.5

    tracer = OwnTracer()
    with LitAgentRunner[Any](tracer).run_context(agent=agent, store=store) as runner:
        finished = await runner.step("x")
    assert isinstance(finished, AttemptedRollout)
    assert finished.attempt.outcome == "scored"
    assert tracer.names == [finished.rollout_id, "agentlightning.message"]
    (span,) = await store.query_spans(finished.rollout_id)
    assert span.attributes["agentlightning.reward.0.value"] == 0.5


async def test_a_tracer_without_a_context_is_a_fault_that_names_the_one_to_use(store: InMemoryLightningStore) -> None:
    runner = LitAgentRunner[Any](DummyTracer())
    with (
        runner.run_context(agent=rollout(lambda task: 1.0), store=store),
        pytest.raises(Exception, match="use OtelTracer"),
    ):
        await runner.step("x")
