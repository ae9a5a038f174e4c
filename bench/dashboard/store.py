"""Times of the dashboard's queries on a store with 100,000 rollouts: pages, searches, figures.

    python -m bench.dashboard.store [memory|sqlite|postgres ...] [--rollouts 100000] [--json FILE]

Each query runs nine times, on the store's own class, without HTTP; the results are the median in milliseconds, and that
of the processor time of this process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

from agentlightning.store.base import LightningStore
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.store.sqlite import SQLiteLightningStore
from agentlightning.types import EnqueueRolloutRequest, RolloutFilter, Span

RUN = "run-1"
ASKED = 9
_BATCH = 500
_TASKS, _SAMPLES = 50, 8
PAGE_MS, FIGURES_MS = 200.0, 100.0
"""Most milliseconds for a filtered page, and for figures by step."""


Figures = tuple[float, float, float | None]
"""Median milliseconds of a query, and of the processor time of this process, and the limit of the first."""


async def fill(store: LightningStore, count: int) -> None:
    """Add this number of ended rollouts of a run of many steps, most of them with a reward."""
    draw = random.Random(7)
    for begin in range(0, count, _BATCH):
        numbers = range(begin, min(begin + _BATCH, count))
        requests = [
            EnqueueRolloutRequest(
                input={"question": f"Book a room for {n % 17} people, number {n}", "level": n % 5},
                mode="val" if n % 10 == 0 else "train",
                run_id=RUN,
                metadata={"step": n // (_TASKS * _SAMPLES), "task": n % _TASKS, "sample": n % _SAMPLES},
            )
            for n in numbers
        ]
        await store.enqueue_many_rollouts(requests)
        claims = await store.dequeue_many_rollouts(limit=_BATCH, worker_id=f"worker-{begin // _BATCH % 8}", run_id=RUN)
        scored = [claim for claim in claims if draw.random() < 0.95]
        await store.add_many_spans([_reward(c.rollout_id, c.attempt.attempt_id, draw.random()) for c in scored])
        ids = {claim.rollout_id for claim in scored}
        await asyncio.gather(
            *(
                store.update_attempt(
                    claim.rollout_id,
                    claim.attempt.attempt_id,
                    status="succeeded",
                    outcome="scored" if claim.rollout_id in ids else "unscored",
                )
                for claim in claims
            )
        )


def _reward(rollout_id: str, attempt_id: str, value: float) -> Span:
    attributes: dict[str, Any] = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": value}
    return Span.from_attributes(attributes=attributes, rollout_id=rollout_id, attempt_id=attempt_id, sequence_id=-1)


def questions(store: LightningStore, count: int) -> dict[str, tuple[Callable[[], Awaitable[Any]], float | None]]:
    """Return the queries by name, each with its limit in milliseconds."""
    of_run = {"run_id": RUN}
    steps = count // (_TASKS * _SAMPLES)

    def page(limit_ms: float | None = PAGE_MS, **arguments: Any) -> tuple[Callable[[], Awaitable[Any]], float | None]:
        chosen = RolloutFilter(**of_run, **arguments.pop("filter", {}))
        return lambda: store.query_rollout_summaries(filter=chosen, **arguments), limit_ms

    def figures(limit_ms: float | None, **arguments: Any) -> tuple[Callable[[], Awaitable[Any]], float | None]:
        chosen = RolloutFilter(**of_run, **arguments.pop("filter", {}))
        return lambda: store.aggregate_rollouts(filter=chosen, **arguments), limit_ms

    return {
        "first page": page(),
        "page of a mode and a step range": page(filter={"mode_in": ["train"], "step_from": 5, "step_to": steps // 2}),
        "page by reward": page(filter={"reward_from": 0.5}, sort_by="reward"),
        "page by duration": page(sort_by="duration"),
        "page by spans": page(sort_by="spans"),
        "page of a task": page(filter={"task": 7}),
        "page with a text": page(filter={"input_contains": "NUMBER 99"}),
        "page in the middle": page(offset=count // 2),
        "last page": page(offset=max(0, count - 100)),
        "1,000 rollouts": page(limit=1000),
        "figures by step": figures(FIGURES_MS),
        "figures by step of a mode": figures(FIGURES_MS, filter={"mode_in": ["train"]}),
        "figures by step with 20 buckets": figures(FIGURES_MS, buckets=20),
        "figures by outcome": figures(None, by="outcome"),
        "figures by task": figures(None, by="task"),
        "figures of all": figures(None, by="none"),
    }


async def measure(store: LightningStore, count: int) -> dict[str, Figures]:
    """Return the median of each query in milliseconds, and its limit."""
    figures: dict[str, Figures] = {}
    for name, (ask, limit) in questions(store, count).items():
        await ask()
        times, cpu = list[float](), list[float]()
        for _ in range(ASKED):
            began, worked = time.perf_counter(), time.process_time()
            await ask()
            times.append(1e3 * (time.perf_counter() - began))
            cpu.append(1e3 * (time.process_time() - worked))
        figures[name] = statistics.median(times), statistics.median(cpu), limit
    return figures


@contextlib.asynccontextmanager
async def opened(kind: str) -> AsyncGenerator[LightningStore]:
    """Yield an empty store of a kind."""
    with contextlib.ExitStack() as stack:
        if kind == "memory":
            store: LightningStore = InMemoryLightningStore()
        elif kind == "sqlite":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            store = SQLiteLightningStore(Path(folder, "store.db"), synchronous="NORMAL")
        else:
            from agentlightning.store.postgres import PostgresLightningStore
            from tests.stubs.postgres_server import PostgresServer

            store = PostgresLightningStore(stack.enter_context(PostgresServer()).uri)
        try:
            yield store
        finally:
            await store.close()


async def run(kinds: list[str], count: int) -> dict[str, dict[str, Figures]]:
    """Fill, query and print, one kind of store after the other."""
    answers: dict[str, dict[str, Figures]] = {}
    for kind in kinds:
        async with opened(kind) as store:
            began = time.perf_counter()
            await fill(store, count)
            print(f"{kind}: {count:,} rollouts, filled in {time.perf_counter() - began:.0f} s", flush=True)
            answers[kind] = await measure(store, count)
        for name, (median, cpu, limit) in answers[kind].items():
            bound = "" if limit is None else f"  (at most {limit:.0f})"
            over = "  OVER" if limit is not None and median > limit else ""
            print(f"  {name:34} {median:8.1f} ms {cpu:8.1f} ms of this process{bound}{over}", flush=True)
    return answers


def main(arguments: list[str]) -> int:
    """Return 1 if a query exceeded its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kinds", nargs="*", choices=[[], "memory", "sqlite", "postgres"], default=[])
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    answers = asyncio.run(run(options.kinds or ["memory", "sqlite", "postgres"], options.rollouts))
    if options.json:
        options.json.write_text(json.dumps(answers, indent=2))
    figures = [pair for each in answers.values() for pair in each.values()]
    return int(any(limit is not None and median > limit for median, _, limit in figures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
