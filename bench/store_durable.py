"""The durable stores with 64 callers at once: what is acknowledged is on disk, and callers share commits."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

from agentlightning.store.engine.store import EngineStore
from agentlightning.store.sqlite import SQLiteLightningStore
from agentlightning.types import AttemptedRollout
from bench.store_figures import Figure
from bench.store_spans import model_call

CALLERS = 64


class Callers:
    """Concurrent callers in one loop, each with its own rollouts; one operation at a time is measured."""

    def __init__(self, store: EngineStore, callers: int) -> None:
        self._store = store
        self._callers = range(callers)
        self._claims: list[list[AttemptedRollout]] = [[] for _ in self._callers]

    async def enqueue(self, caller: int, number: int) -> None:
        await self._store.enqueue_rollout({"task": number})

    async def claim(self, caller: int, number: int) -> None:
        claim = await self._store.dequeue_rollout(worker_id=f"w{caller}")
        assert claim is not None
        self._claims[caller].append(claim)

    async def span(self, caller: int, number: int) -> None:
        claims = self._claims[caller]
        await self._store.add_span(model_call(claims[number % len(claims)].attempt, number))

    async def finish(self, caller: int, number: int) -> None:
        claim = self._claims[caller].pop()
        await self._store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status="succeeded")

    async def rate(self, call: Callable[[int, int], Awaitable[None]], each: int) -> float:
        """Return calls per second when every caller makes `each` of them, one after another."""

        async def calls(caller: int) -> None:
            for number in range(each):
                await call(caller, number)

        began = time.perf_counter()
        await asyncio.gather(*(calls(caller) for caller in self._callers))
        return each * len(self._callers) / (time.perf_counter() - began)


_OPERATIONS = ("enqueue", "claim", "span", "finish")


async def _rates(store: EngineStore, callers: int, each: int, rounds: int) -> dict[str, float]:
    """Return the rate of each operation (medians), and of a mix with as many of each (`all`)."""
    calls = Callers(store, callers)
    measured = [{name: await calls.rate(getattr(calls, name), each) for name in _OPERATIONS} for _ in range(rounds)]
    rates = {name: statistics.median(rates[name] for rates in measured) for name in _OPERATIONS}
    rates["all"] = len(rates) / sum(1 / rate for rate in rates.values())
    return rates


@contextlib.asynccontextmanager
async def _sqlite() -> AsyncIterator[EngineStore]:
    with tempfile.TemporaryDirectory() as folder:
        store = SQLiteLightningStore(Path(folder) / "bench.db", synchronous="FULL")
        yield store
        await store.close()


@contextlib.contextmanager
def postgres_server() -> Iterator[str]:
    """Yield the address of a new PostgreSQL server.

    Raises:
        LookupError: no server can be started; says why.
    """
    if importlib.util.find_spec("agentlightning.store.postgres") is None:
        raise LookupError("there is no PostgreSQL store")
    if importlib.util.find_spec("psycopg") is None:
        raise LookupError("psycopg is not installed: pip install 'agl-framework[postgres]'")
    from tests.stubs.postgres_server import PostgresServer, find_binaries

    if find_binaries() is None:
        raise LookupError("no PostgreSQL server is installed: apt-get install postgresql")
    with PostgresServer() as server:
        yield server.uri


@contextlib.asynccontextmanager
async def _postgres() -> AsyncIterator[EngineStore]:
    with postgres_server() as uri:
        from agentlightning.store.postgres import PostgresLightningStore

        store = PostgresLightningStore(uri)
        yield store
        await store.close()


def measure_durable(quick: bool) -> list[Figure]:
    """Measure SQLite and PostgreSQL with 64 callers, and SQLite with one."""
    each, rounds = (10, 2) if quick else (25, 5)

    async def measured(
        opened: Callable[[], contextlib.AbstractAsyncContextManager[EngineStore]], callers: int, each: int
    ) -> dict[str, float]:
        async with opened() as store:
            return await _rates(store, callers, each, rounds)

    figures: list[Figure] = []
    for name, opened, target in (("sqlite, full sync", _sqlite, 3000), ("postgres", _postgres, 1000)):
        try:
            rates = asyncio.run(measured(opened, CALLERS, each))
        except LookupError as reason:
            figures.append(Figure(f"{name}: all operations, {CALLERS} callers, per s", None, target, note=str(reason)))
            continue
        figures.append(Figure(f"{name}: all operations, {CALLERS} callers, per s", rates.pop("all"), target))
        figures += [Figure(f"{name}: {what}, {CALLERS} callers, per s", rate, target) for what, rate in rates.items()]
    alone = asyncio.run(measured(_sqlite, 1, each))
    return [*figures, Figure("sqlite, full sync: all operations, one caller, per s", alone["all"])]
