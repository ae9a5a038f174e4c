"""A worker that is killed in the middle of a rollout delays it, and nothing else."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from typing import Any

from agentlightning.emitter import emit_reward
from agentlightning.litagent import rollout
from agentlightning.runner import LitAgentRunner
from agentlightning.semconv import STALE
from agentlightning.store.client_server import LightningStoreClient, LightningStoreServer
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.otel import OtelTracer
from agentlightning.types import AttemptedRollout, Span


@rollout
async def hangs(task: Any) -> float:
    await asyncio.Event().wait()
    return 1.0


def _serve_until_killed(address: str) -> None:
    async def serve() -> None:
        runner: LitAgentRunner[Any] = LitAgentRunner(OtelTracer(), heartbeat_interval=0.1, interval_jitter=0.0)
        with runner.run_context(agent=hangs, store=LightningStoreClient(address)):
            await runner.iter()

    asyncio.run(serve())


async def _claimed(store: InMemoryLightningStore, rollout_id: str) -> AttemptedRollout:
    while True:
        rollout = await store.get_rollout_by_id(rollout_id)
        workers = await store.query_workers()
        if isinstance(rollout, AttemptedRollout) and any(worker.last_heartbeat_time for worker in workers):
            return rollout
        await asyncio.sleep(0.02)


async def test_within_its_lease_the_rollout_goes_to_another_attempt_and_its_reward_counts_once() -> None:
    store = InMemoryLightningStore(lease_seconds=0.6, scan_debounce_seconds=0.05)
    server = LightningStoreServer(store, port=0)
    await server.start()
    made = await store.enqueue_rollout(input="x")
    child = multiprocessing.get_context("spawn").Process(target=_serve_until_killed, args=(server.endpoint,))
    child.start()
    dead = (await asyncio.wait_for(_claimed(store, made.rollout_id), 30)).attempt
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)

    runner: LitAgentRunner[Any] = LitAgentRunner(OtelTracer(), max_rollouts=1, poll_interval=0.2)
    with runner.run_context(agent=rollout(lambda task: 1.0), store=store):
        await asyncio.wait_for(runner.iter(), 30)
    late = Span.from_core_fields(
        emit_reward(0.5, propagate=False),
        rollout_id=made.rollout_id,
        attempt_id=dead.attempt_id,
        sequence_id=-1,
    )
    await store.add_span(late)

    first, second = await store.query_attempts(made.rollout_id)
    assert (first.outcome, first.outcome_reason) == ("infrastructure_fault", "lease_expired")
    assert (second.status, second.outcome) == ("succeeded", "scored")
    spans = await store.query_spans(made.rollout_id)
    assert [(span.attempt_id, span.attributes.get(STALE, False)) for span in spans] == [
        (second.attempt_id, False),
        (first.attempt_id, True),
    ]
    await asyncio.to_thread(child.join, 10)
    await server.stop()
    await store.close()
