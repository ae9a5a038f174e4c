"""The memory store in process: rates of its operations, with nothing in it and with 100,000 rollouts; pages; memory."""

from __future__ import annotations

import gc
import statistics
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import psutil

from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, Span
from bench.store_children import Child, Part
from bench.store_figures import Figure, clock
from bench.store_spans import model_calls

FULL = 100_000
_RUNS = [None, None, None, *(f"run-{n}" for n in range(7))]
_BATCH = 64
_PAGE = 100


class Operations(Part):
    """Measures operations on a store with a number of rollouts; half of them have ended, the others are queued.

    With no rollouts each measurement begins with a new store. Pages sorted by start time were requested before, as by a
    dashboard, so that the operations maintain that order.
    """

    def __init__(self, rollouts: int) -> None:
        self._rollouts = rollouts
        self._store = InMemoryLightningStore()

    async def open(self) -> None:
        for first in range(0, self._rollouts, 1000):
            run_ids = [_RUNS[(first + i) % len(_RUNS)] for i in range(1000)]
            await self._store.enqueue_many_rollouts(
                [EnqueueRolloutRequest(input={"task": first + i}, run_id=run_id) for i, run_id in enumerate(run_ids)]
            )
        for run_id in sorted(set(_RUNS), key=str):
            for _ in range(_RUNS.count(run_id) * self._rollouts // (1000 * len(_RUNS)) // 2):
                for claim in await self._store.dequeue_many_rollouts(limit=1000, worker_id="w", run_id=run_id):
                    await self._finish(claim)

    async def close(self) -> None:
        await self._store.close()

    async def measure(self, count: int) -> dict[str, float]:
        """Return the seconds that each operation takes, by name."""
        if not self._rollouts:
            self._store = InMemoryLightningStore()
        await self._store.query_rollouts(sort_by="start_time", limit=_PAGE)
        store, claims = self._store, list[AttemptedRollout]()

        async def claim() -> None:
            rollout = await store.dequeue_rollout(worker_id="worker-0")
            assert rollout is not None
            claims.append(rollout)

        tasks = [{"task": number} for number in range(count)]
        seconds = {"enqueue": await _each((lambda t=task: store.enqueue_rollout(input=t)) for task in tasks)}
        seconds["claim"] = await _each([claim] * count)
        spans = [span for held in claims[:50] for span in model_calls(held, 1, count // 25)]
        seconds["span"] = await _each([(lambda s=span: store.add_span(s)) for span in spans])
        batches = [model_calls(held, 1, _BATCH) for held in claims[50 : 50 + count // 16]]
        seconds["batch"] = await _each([(lambda b=batch: store.add_many_spans(b)) for batch in batches]) / _BATCH
        del spans, batches
        template = model_calls(claims[0], 1, 10)
        seconds["life"] = await _each([lambda: self._live(template)] * (count // 5))
        for held in claims:
            await self._finish(held)
        return seconds

    async def pages(self, repeat: int) -> dict[str, float]:
        """Return the seconds of a first page by status and by run, sorted by start time; apart, of the very first."""
        durations: dict[str, list[float]] = defaultdict(list)
        filters: dict[str, dict[str, Any]] = {"status": {"status_in": ["succeeded"]}, "run": {"run_id": "run-3"}}
        for number in range(repeat):
            for name, chosen in filters.items():
                began = clock()
                page = await self._store.query_rollouts(
                    **chosen, sort_by="start_time", sort_order="desc", limit=_PAGE, offset=0
                )
                durations[name if number else f"{name}, first"].append(clock() - began)
                assert len(page.items) == _PAGE
        return {name: statistics.median(seconds) for name, seconds in durations.items()}

    async def _live(self, template: list[Span]) -> None:
        """Run the life of a rollout: enqueue, claim, ten spans one by one, end."""
        await self._store.enqueue_rollout(input={"task": 1})
        claim = await self._store.dequeue_rollout(worker_id="worker-0")
        assert claim is not None
        of_claim = {"rollout_id": claim.rollout_id, "attempt_id": claim.attempt.attempt_id}
        for span in [span.model_copy(update=of_claim) for span in template]:
            await self._store.add_span(span)
        await self._finish(claim)

    async def _finish(self, claim: AttemptedRollout) -> None:
        await self._store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status="succeeded")


class SpanMemory(Part):
    """Measures the resident memory of spans in a store, in a process that has done nothing else."""

    async def open(self) -> None:
        self._store = InMemoryLightningStore()

    async def close(self) -> None:
        await self._store.close()

    async def bytes_per_span(self, rollouts: int, spans: int) -> float:
        claims = [await self._store.start_rollout({"task": n}, worker_id="w") for n in range(rollouts)]
        gc.collect()
        before = psutil.Process().memory_info().rss
        for claim in claims:
            await self._store.add_many_spans(model_calls(claim, 1, spans))
        gc.collect()
        return (psutil.Process().memory_info().rss - before) / (rollouts * spans)


async def _each(calls: Iterable[Callable[[], Awaitable[object]]]) -> float:
    """Return the seconds per call, including the garbage collector's."""
    waiting = list(calls)
    began = clock()
    for call in waiting:
        await call()
    return (clock() - began) / len(waiting)


_RATES = {  # name: (label, the older system's rate, the target as a multiple of it)
    "enqueue": ("enqueue", 9_300, 4.0),
    "claim": ("claim", 3_700, 6.0),
    "span": ("spans one by one", 3_800, 6.0),
    "batch": (f"spans in batches of {_BATCH}", 20_500, 2.5),
    "life": ("life of a rollout, 10 spans one by one", 290, 10.0),
}


def measure_memory(quick: bool) -> list[Figure]:
    """Measure the memory store; the empty and the full one in two processes, in turns."""
    rounds, count = (3, 500) if quick else (9, 1500)
    with Child(Operations, 0) as empty, Child(Operations, FULL) as full, Child(SpanMemory) as spans:
        pages = full.call("pages", 10 if quick else 50)
        in_turns = [(empty.call("measure", count), full.call("measure", count)) for _ in range(rounds)]
        per_span = spans.call("bytes_per_span", 100, 100)
    figures: list[Figure] = []
    for name, (label, older, times) in _RATES.items():
        rate = 1 / statistics.median(seconds[name] for seconds, _ in in_turns)
        figures.append(Figure(f"memory: {label}, per s", rate, older * times, older=older))
    for name, (label, _, _) in _RATES.items():
        slower = statistics.median(at_full[name] / at_empty[name] for at_empty, at_full in in_turns)
        figures.append(Figure(f"memory: {label}, time at {FULL:,} rollouts / when empty", slower, 1.2, at_most=True))
    for name, seconds in pages.items():
        bound = None if "first" in name else 2.0
        figures.append(
            Figure(f"memory: page of {_PAGE} by {name}, of {FULL:,}, ms", 1e3 * seconds, bound, at_most=True, older=32)
        )
    return [*figures, Figure("memory: bytes per small span", per_span, 1500, at_most=True, older=4116)]
