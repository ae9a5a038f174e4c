"""Load a store server for a long time and see whether its memory stays flat: 50 rollouts a second with 10 spans each.

Rollouts come in groups: enqueued, claimed, given their spans, ended, waited for, read, and removed by retention later.
Several backends are loaded at once, each with a server and a client process of its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from agentlightning.store.client_server import LightningStoreClient
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, Span
from tests.chaos.processes import CONTEXT
from tests.stubs.ports import free_port
from tests.stubs.processes import Process

SPANS = 10
GROUP = 5
MOST_AT_ONCE = 40
"""Groups under way; when there are more, the load waits, for the machine is too slow for it."""
KEEP_LAST = 500
WINDOWS = 10
"""Number of parts of the measured time; each is judged by its median."""
ALLOWED_GROWTH = 0.10


@dataclass
class Soak:
    """The operations on one server, and its resident memory in bytes meanwhile."""

    backend: str
    rate: float
    done: int = 0
    seconds: float = 0.0
    warm_up: list[int] = field(default_factory=list)
    measured: list[int] = field(default_factory=list)

    @property
    def windows(self) -> list[float]:
        """Median memory in each part of the measured time, in MiB."""
        size = max(1, len(self.measured) // WINDOWS)
        parts = [self.measured[i : i + size] for i in range(0, len(self.measured), size)]
        return [statistics.median(part) / 2**20 for part in parts[:WINDOWS]]

    @property
    def growth(self) -> float:
        """Return the part by which the largest window is above the end of the warm-up."""
        settled = statistics.median(self.warm_up[-max(1, len(self.warm_up) // 10) :]) / 2**20
        return max(self.windows) / settled - 1

    @property
    def flat(self) -> bool:
        """The verdict."""
        return self.growth <= ALLOWED_GROWTH

    def __str__(self) -> str:
        sizes = " ".join(f"{size:.0f}" for size in self.windows)
        verdict = "flat" if self.flat else "NOT FLAT"
        work = f"{self.done} rollouts, {self.done / self.seconds:.1f} a second"
        memory = f"MiB after the warm-up {self.warm_up[-1] / 2**20:.0f}, then {sizes}"
        return f"{self.backend:<8} {work}; {memory}; growth {self.growth:+.1%}: {verdict}"


@contextlib.contextmanager
def server(backend: str) -> Iterator[tuple[psutil.Process, str]]:
    """`agl store` with retention, in a process of its own; its address."""
    with tempfile.TemporaryDirectory() as folder:
        where = {"memory": "memory", "sqlite": f"{folder}/store.db"}[backend]
        port = str(free_port())
        options = ["--keep-last", str(KEEP_LAST), "--log-level", "ERROR"]
        process = Process(["agl", "store", "--db", where, "--port", port, *options], Path(folder), {})
        try:
            process.until(port)  # it says where it listens
            yield psutil.Process(process.popen.pid), f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def soak(backend: str, rate: float, warm_up_seconds: float, seconds: float) -> Soak:
    """Load one backend and return the measurement."""
    measurement = Soak(backend, rate)
    with server(backend) as (process, endpoint):
        asyncio.run(_load(endpoint, process, measurement, warm_up_seconds, warm_up_seconds + seconds))
    return measurement


async def _load(endpoint: str, process: psutil.Process, run: Soak, warm_up_seconds: float, seconds: float) -> None:
    client = LightningStoreClient(endpoint, deadline=60.0)
    began = time.monotonic()
    sampling = asyncio.create_task(_sample(process, run, began + warm_up_seconds))
    lives: set[asyncio.Task[None]] = set()
    number = 0
    try:
        while (passed := time.monotonic() - began) < seconds:
            await asyncio.sleep(number * GROUP / run.rate - passed)
            if len(lives) >= MOST_AT_ONCE:
                await asyncio.wait(lives, return_when=asyncio.FIRST_COMPLETED)
            for life in [life for life in lives if life.done()]:
                life.result()
                lives.discard(life)
            lives.add(asyncio.create_task(_live(client, run, number)))
            number += 1
        await asyncio.gather(*lives)
    finally:
        run.seconds = time.monotonic() - began
        for task in (sampling, *lives):
            task.cancel()
        await asyncio.gather(sampling, *lives, return_exceptions=True)
        await client.close()


async def _sample(process: psutil.Process, measurement: Soak, warm_at: float) -> None:
    while True:
        size = process.memory_info().rss
        (measurement.warm_up if time.monotonic() < warm_at else measurement.measured).append(size)
        await asyncio.sleep(0.5)


async def _live(client: LightningStoreClient, measurement: Soak, number: int) -> None:
    """The life of a group of rollouts, as an algorithm and a worker lead it."""
    worker = f"worker-{number % 16}"
    requests = [EnqueueRolloutRequest(input={"number": number, "text": "x" * 500}) for _ in range(GROUP)]
    rollouts = await client.enqueue_many_rollouts(requests)
    claims: list[AttemptedRollout] = []
    while len(claims) < GROUP:  # another group's worker may have been quicker; as many are left for us
        claims += await client.dequeue_many_rollouts(limit=GROUP - len(claims), worker_id=worker, timeout=60.0)
    await client.update_worker(worker, {"done": number})
    await client.add_many_spans([_span(claim, i) for claim in claims for i in range(SPANS)])
    for claim in claims:
        await client.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status="succeeded")
    await client.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in rollouts], timeout=60.0)
    await client.query_spans(rollouts[0].rollout_id)
    measurement.done += GROUP


def _span(claim: AttemptedRollout, number: int) -> Span:
    return Span.from_attributes(
        attributes={"text": "y" * 300, "number": number},
        rollout_id=claim.rollout_id,
        attempt_id=claim.attempt.attempt_id,
        sequence_id=-1,
        name="step",
    )


def soak_all(backends: list[str], rate: float, warm_up_seconds: float, seconds: float) -> list[Soak]:
    """Load several at the same time."""
    with concurrent.futures.ProcessPoolExecutor(len(backends), CONTEXT) as pool:
        running = [pool.submit(soak, backend, rate, warm_up_seconds, seconds) for backend in backends]
        return [one.result() for one in running]
