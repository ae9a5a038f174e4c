"""Run tasks through a real runner, in its own process, and return their rollouts in the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentlightning.runner import LitAgentRunner
from agentlightning.store.base import LightningStore
from agentlightning.tracer.otel import OtelTracer
from agentlightning.types import AttemptedRollout, Hook, RolloutConfig


def runner_of(**settings: Any) -> LitAgentRunner[Any]:
    return LitAgentRunner(OtelTracer(), **settings)


async def run_tasks(
    store: LightningStore,
    agent: Any,
    *tasks: Any,
    config: RolloutConfig | None = None,
    hooks: Sequence[Hook] | None = None,
    **settings: Any,
) -> list[AttemptedRollout]:
    """Enqueue the tasks, run them all with an agent, and return the rollouts in order."""
    made = [await store.enqueue_rollout(input=task, config=config, mode="train") for task in tasks]
    runner = runner_of(**{"max_rollouts": len(made), **settings})
    with runner.run_context(agent=agent, store=store, hooks=hooks):
        await runner.iter()
    finished = [await store.get_rollout_by_id(rollout.rollout_id) for rollout in made]
    return [rollout for rollout in finished if isinstance(rollout, AttemptedRollout)]


async def status_of(store: LightningStore, rollout_id: str) -> str:
    rollout = await store.get_rollout_by_id(rollout_id)
    assert rollout is not None
    return rollout.status
