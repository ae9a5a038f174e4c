"""The cost of a span for the agent: the tracer's own time from its start to its end, in the agent's thread."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from agentlightning.emitter import emit_reward
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.otel import OtelTracer
from bench.store_figures import Figure, clock
from bench.store_spans import ATTRIBUTES


def _microseconds(make: Callable[[], Any], count: int) -> float:
    began = clock()
    for _ in range(count):
        make()
    return 1e6 * (clock() - began) / count


def _library_span(tracer: trace.Tracer) -> Callable[[], None]:
    """Return the work of an instrumented client for one call: a current span with a dozen attributes."""

    def make() -> None:
        with tracer.start_as_current_span("openai.chat.completion") as span:
            for key, value in ATTRIBUTES.items():
                span.set_attribute(key, value)

    return make


async def _measure(rounds: int, count: int) -> dict[str, list[float]]:
    durations: dict[str, list[float]] = {"bare": [], "span": [], "operation": [], "reward": []}
    bare = _library_span(TracerProvider().get_tracer("bench"))
    store, tracer = InMemoryLightningStore(), OtelTracer()
    tracer.init(store)
    tracer.init_worker(0, store)

    def operation() -> None:
        with tracer.operation_context("step", attributes=dict(ATTRIBUTES)):
            pass

    for _ in range(rounds):
        claim = await store.start_rollout({"task": 1})
        durations["bare"].append(_microseconds(bare, count))
        rollout_id, attempt_id = claim.rollout_id, claim.attempt.attempt_id
        async with tracer.trace_context("bench", rollout_id=rollout_id, attempt_id=attempt_id) as otel_tracer:
            durations["span"].append(_microseconds(_library_span(otel_tracer), count))
            durations["operation"].append(_microseconds(operation, count))
            durations["reward"].append(_microseconds(lambda: emit_reward(0.5), count))
        await store.update_attempt(rollout_id, attempt_id, status="succeeded")
    tracer.teardown_worker(0)
    return durations


def measure_tracer(quick: bool) -> list[Figure]:
    """Measure spans of a library, operations and rewards inside a rollout, and bare OpenTelemetry for comparison."""
    durations = asyncio.run(_measure(3 if quick else 7, 500 if quick else 2000))
    medians = {name: statistics.median(values) for name, values in durations.items()}
    beside = f"OpenTelemetry alone {medians['bare']:.1f}"
    return [
        Figure("a library's span with 12 attributes, us", medians["span"], 50, True, note=beside),
        Figure("an operation with 12 attributes, us", medians["operation"], 50, True),
        Figure("a reward, us", medians["reward"]),
    ]
