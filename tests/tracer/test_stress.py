"""Fifty rollouts at once in one process, each in tasks, threads and nested operations: no span crosses over."""

from __future__ import annotations

import asyncio
import contextvars
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import trace as trace_api

from agentlightning.emitter import emit_annotation, emit_message, emit_reward, operation
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.otel import OtelTracer
from agentlightning.types import AttemptedRollout, Span

from .test_otel import ids

ROLLOUTS = 50
SHARED = operation(name="shared block")
"""One object for the blocks of all rollouts."""


@operation
def tool(label: str, depth: int) -> int:
    emit_message(label)
    return depth if depth == 0 else tool(label, depth - 1)


@operation
async def step(label: str, depth: int) -> None:
    with SHARED:
        SHARED.set_input(label=label)
        await asyncio.sleep(random.random() / 100)
        emit_annotation({"who": label})
        if depth:
            await asyncio.gather(step(label, depth - 1), asyncio.to_thread(tool, label, 1))
        SHARED.set_output(label)


@operation
def numbers(label: str) -> Iterator[int]:
    for number in range(3):
        emit_message(label)
        yield number


@operation
async def numbers_async(label: str) -> AsyncIterator[int]:
    for number in range(3):
        emit_message(label)
        await asyncio.sleep(0)
        yield number


class Librarian:
    """A library with a thread of its own, older than every rollout, that traces where its callers say."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._pool.submit(int).result()

    async def ask(self, label: str) -> None:
        here = otel_context.get_current()

        def answer() -> None:
            token = otel_context.attach(here)
            with trace_api.get_tracer("library").start_as_current_span("library", attributes={"who": label}):
                emit_message(label)
            otel_context.detach(token)

        await asyncio.wrap_future(self._pool.submit(answer))

    def close(self) -> None:
        self._pool.shutdown()


async def agent(label: str, librarian: Librarian, pool: ThreadPoolExecutor, everybody: asyncio.Event) -> None:
    await everybody.wait()
    await asyncio.gather(step(label, 2), step(label, 1))
    running, running_async = numbers(label), numbers_async(label)
    for _ in range(3):  # two generators and other work, in turns
        next(running)
        await running_async.__anext__()
        tool(label, 0)
    assert list(running) == []
    assert [number async for number in running_async] == []
    carried = contextvars.copy_context()
    await asyncio.wrap_future(pool.submit(carried.run, tool, label, 2))
    thread = threading.Thread(target=contextvars.copy_context().run, args=(emit_message, label))
    thread.start()
    await asyncio.to_thread(thread.join)
    with operation(name="asks the library"):
        await librarian.ask(label)
    emit_reward(float(label.split()[1]))


def labels_of(span: Span) -> set[str]:
    """Every label that a span carries, whatever it is."""
    return {value for value in span.attributes.values() if isinstance(value, str) and value.startswith("rollout ")}


async def test_no_span_crosses_over(store: InMemoryLightningStore, tracer: OtelTracer) -> None:
    everybody, librarian = asyncio.Event(), Librarian()
    entered: list[int] = []
    kinds: list[Counter[str]] = []

    async def run_rollout(number: int) -> AttemptedRollout:
        rollout = await store.start_rollout(input=number)
        async with tracer.trace_context("trace", **ids(rollout)):
            entered.append(number)
            if len(entered) == ROLLOUTS:
                everybody.set()
            await agent(f"rollout {number}", librarian, pool, everybody)
        return rollout

    with ThreadPoolExecutor(4) as pool:
        rollouts = await asyncio.gather(*(run_rollout(number) for number in range(ROLLOUTS)))
    librarian.close()
    for number, rollout in enumerate(rollouts):
        spans: list[Any] = list(await store.query_spans(rollout.rollout_id))
        assert {label for span in spans for label in labels_of(span)} == {f"rollout {number}"}
        own = {span.span_id for span in spans}
        assert {span.parent_id for span in spans} - {None} <= own
        assert [
            span.attributes["agentlightning.reward.0.value"]
            for span in spans
            if "agentlightning.reward.0.value" in span.attributes
        ] == [number]
        assert all(span.status.status_code != "ERROR" for span in spans)
        assert sorted(span.sequence_id for span in spans) == list(range(1, len(spans) + 1))
        kinds.append(Counter(span.name for span in spans))
    assert kinds == [kinds[0]] * ROLLOUTS
    assert sum(kinds[0].values()) > 50
