"""A real store, and a way to run tasks through a real runner."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from agentlightning.runner import LitAgentRunner
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.otel import OtelTracer
from agentlightning.types import AttemptedRollout, Hook, RolloutConfig


@pytest.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    store = InMemoryLightningStore()
    yield store
    await store.close()


@pytest.fixture
def serve(store: InMemoryLightningStore) -> Callable[..., Any]:
    """Enqueue inputs, run them all with an agent, and return the rollouts in order."""

    async def serve(
        agent: Any,
        *inputs: Any,
        config: RolloutConfig | None = None,
        hooks: Sequence[Hook] | None = None,
        **settings: Any,
    ) -> list[AttemptedRollout]:
        made = [await store.enqueue_rollout(input=task, config=config, mode="train") for task in inputs]
        runner: LitAgentRunner[Any] = LitAgentRunner(OtelTracer(), max_rollouts=len(made), **settings)
        with runner.run_context(agent=agent, store=store, hooks=hooks):
            await runner.iter()
        finished = [await store.get_rollout_by_id(rollout.rollout_id) for rollout in made]
        return [rollout for rollout in finished if isinstance(rollout, AttemptedRollout)]

    return serve
