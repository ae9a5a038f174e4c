"""Promises of the store that no single operation shows: reads, wake-ups, and the threads and loops that may call.

The table of `docs/deep-dive/store-promises.md` names these tests.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import aiohttp
import pytest

from agentlightning.errors import BusyError, GoneError
from agentlightning.store import (
    InMemoryLightningStore,
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
    LightningStoreThreaded,
    SQLiteLightningStore,
)
from agentlightning.store.base import is_finished
from agentlightning.store.http.operations import PREFIX
from agentlightning.store.rules.claims import claim, forget_claim_tokens
from agentlightning.store.rules.enqueue import enqueue
from agentlightning.store.rules.query import Plan
from agentlightning.store.rules.spans import decode_all, read_page
from agentlightning.store.rules.tx import Backend, Record
from agentlightning.store.rules.updates import update_attempt
from agentlightning.store.rules.workers import forget_silent_workers, heartbeat
from agentlightning.store.sql.writes import Seen
from agentlightning.store.sqlite.tx import SQLiteLink, SQLiteTx
from agentlightning.types import EnqueueRolloutRequest, RolloutConfig, RolloutStatus
from agentlightning.utils.server_launcher import PythonServerLauncherArgs
from tests.store.conftest import Serve
from tests.store.parts import required, span_of, until

SETTINGS = {"scan_debounce_seconds": 0.0, "lease_seconds": 0.3}


# --- the watch over workers and limits ---------------------------------------------------------------------------


async def test_the_watch_reads_only_what_may_have_lapsed(local: Any) -> None:
    limits = [None, 3600.0, 0.001]
    started = [await local.start_rollout(i, config=RolloutConfig(timeout_seconds=limits[i % 3])) for i in range(30)]
    now = time.time() + 1
    due, _ = local._backend.execute(lambda tx: tx.due(now, 1000), write=False)
    assert {record.rollout.rollout_id for record in due} <= {started[i].rollout_id for i in range(2, 30, 3)}


async def test_a_watch_that_fails_fails_no_call(
    local: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> Any:
        raise RuntimeError("out of order")

    monkeypatch.setattr(local._runtime, "_lapsed_script", fail)
    with caplog.at_level(logging.ERROR, "agentlightning.store"):
        made = await local.enqueue_rollout("x")
        assert await local.get_rollout_by_id(made.rollout_id) == made
    assert "scan for expired attempts failed" in caplog.text


async def test_an_idle_worker_that_falls_silent_becomes_unknown(local: LightningStore) -> None:
    await local.update_worker("w")
    await local.dequeue_rollout("w")

    async def is_unknown() -> bool:
        worker = await local.get_worker_by_id("w")
        return worker is not None and worker.status == "unknown"

    await until(is_unknown)


def test_workers_long_silent_and_tokens_long_used_are_forgotten(local: Any) -> None:
    backend: Backend = local._backend

    def fill(tx: Any) -> None:
        enqueue(tx, 0.0, str, [EnqueueRolloutRequest(input=1)] * 3)
        for worker in ("gone", "holds"):
            heartbeat(tx, 0.0, worker, {}, None)

    def script(tx: Any) -> tuple[list[str], int]:
        return [key for key, _ in tx.scan("worker")], tx.count_rows("claim")

    backend.execute(fill)
    backend.execute(lambda tx: claim(tx, 0.0, str, "token", None, "holds", 1))

    def forget(now: float) -> None:
        backend.execute(lambda tx: forget_silent_workers(tx, now, 30.0))
        backend.execute(lambda tx: forget_claim_tokens(tx, now))

    forget(500.0)
    assert backend.execute(script, write=False)[0] == (["gone", "holds"], 1)
    forget(90_000.0)
    assert backend.execute(script, write=False)[0] == (["holds"], 1), "its claim is in hand, and may be asked for yet"
    backend.execute(lambda tx: update_attempt(tx, 90_000.0, "ro-0", "latest", {"status": "succeeded"}))
    forget(90_500.0)
    assert backend.execute(script, write=False)[0][1] == 1
    forget(91_000.0)
    assert backend.execute(script, write=False)[0][1] == 0


# --- waiting -----------------------------------------------------------------------------------------------------


async def test_a_thousand_waits_need_no_thread_and_each_ends_with_its_rollout(local: Any) -> None:
    started = [await local.start_rollout(i) for i in range(300)]
    ids = [rollout.rollout_id for rollout in started]
    await asyncio.wait_for(local.wait_for_rollouts(rollout_ids=ids[:1], timeout=0.01), 5)
    threads = threading.active_count()
    single = [asyncio.create_task(local.wait_for_rollouts(rollout_ids=[i])) for i in ids for _ in range(3)]
    whole = asyncio.create_task(local.wait_for_rollouts(rollout_ids=ids, timeout=60))
    waiter = asyncio.create_task(local.wait_for_rollouts(rollout_ids=ids, timeout=60))
    await asyncio.sleep(0.1)
    assert threading.active_count() <= threads
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    await asyncio.gather(*[local.update_rollout(i, status="succeeded") for i in ids])
    assert [len(results) for results in await asyncio.wait_for(asyncio.gather(*single), 20)] == [1] * 900
    assert [results.rollout_id for results in await asyncio.wait_for(whole, 20)] == ids
    assert local._runtime._waiters.parked == 0


# --- threads, loops, processes -----------------------------------------------------------------------------------


def test_many_threads_read_and_write_at_once(tmp_path: Path) -> None:
    """Run threads with an event loop of their own, all on one store."""
    for made in (InMemoryLightningStore(), SQLiteLightningStore(tmp_path / "x.db", synchronous="NORMAL")):

        async def write(store: LightningStore = made) -> None:
            for number in range(40):
                claimed = await store.start_rollout(number, worker_id=f"w{number % 3}")
                await store.add_many_spans([span_of(claimed) for _ in range(3)])
                await store.update_attempt(claimed.rollout_id, "latest", status="succeeded")
                await store.update_resources(f"r{number}", {})

        async def read(store: LightningStore = made) -> None:
            for _ in range(20):
                for rollout in await store.query_rollouts(status_in=["running", "succeeded"], sort_by="end_time"):
                    assert is_finished(rollout) == (rollout.end_time is not None)
                await store.query_workers()
                await store.query_resources()
                await store.statistics()

        with ThreadPoolExecutor(6) as threads:
            list(threads.map(lambda work: asyncio.run(work()), (write, read) * 3))
        counts = asyncio.run(made.statistics())
        assert (counts["total_rollouts"], counts["total_spans"], counts["total_resources"]) == (120, 360, 40)
        asyncio.run(made.close())


class Racy(LightningStore):
    """A store that breaks when two calls are in it at once, and that really waits in each."""

    def __init__(self) -> None:
        self.inside = 0
        self.calls = 0

    async def get_rollout_by_id(self, rollout_id: str) -> None:
        self.inside += 1
        assert self.inside == 1, "two calls at once"
        await asyncio.sleep(0.001)
        self.inside -= 1
        self.calls += 1


def test_a_store_that_is_not_thread_safe_is_called_from_many_threads_and_coroutines() -> None:
    racy = Racy()
    threaded = LightningStoreThreaded(racy)

    async def call() -> None:
        await asyncio.gather(*(threaded.get_rollout_by_id("x") for _ in range(10)))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: asyncio.run(asyncio.wait_for(call(), 20)), range(4)))
    asyncio.run(threaded.close())
    assert racy.calls == 40


@contextmanager
def served(store: LightningStore) -> Iterator[LightningStoreServer]:
    """Serve a store from a thread with a loop of its own."""
    arguments = PythonServerLauncherArgs(port=0, launch_mode="thread")
    server = LightningStoreServer(store, launcher_args=arguments)
    asyncio.run(server.start())
    try:
        yield server
    finally:
        asyncio.run(server.stop())


def test_a_client_lets_go_of_the_connections_of_loops_that_are_gone() -> None:
    with served(InMemoryLightningStore()) as server:
        client = LightningStoreClient(server.endpoint, deadline=5.0)
        for number in range(4):
            assert asyncio.run(client.enqueue_rollout(number)).input == number
        assert len(client._connections) == 1
        asyncio.run(client.close())
        gc.collect()


def test_a_server_that_is_sent_to_another_process_is_a_client_there() -> None:
    with served(InMemoryLightningStore()) as server:
        there = pickle.loads(pickle.dumps(server))
        assert type(there) is LightningStoreClient

        async def both() -> tuple[Any, Any]:
            made = await there.enqueue_rollout("from there")
            rollout = await server.get_rollout_by_id(made.rollout_id)
            await there.close()
            return made, rollout

        made, stored_rollout = asyncio.run(both())
        assert made == stored_rollout


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_server_that_a_forked_child_inherits_reaches_its_parents_store() -> None:
    memory = InMemoryLightningStore()
    with served(memory) as server:
        child = os.fork()
        if child == 0:
            try:
                asyncio.run(asyncio.wait_for(server.enqueue_rollout("from the child"), 20))
                os._exit(0)
            except BaseException:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [rollout.input for rollout in asyncio.run(memory.query_rollouts())] == ["from the child"]


# --- how much is read --------------------------------------------------------------------------------------------


async def test_an_operation_in_memory_touches_its_own_record_only(monkeypatch: pytest.MonkeyPatch) -> None:
    store = InMemoryLightningStore(scan_debounce_seconds=1e9)
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(2000)])
    held = [await store.dequeue_rollout("w") for _ in range(1000)]
    claimed = required(held[500])
    copies, copy = 0, Record.copy

    def counted(record: Record) -> Record:
        nonlocal copies
        copies += 1
        return copy(record)

    monkeypatch.setattr(Record, "copy", counted)
    calls: list[Callable[[], Any]] = [
        lambda: store.dequeue_rollout("w"),
        lambda: store.add_many_spans([span_of(claimed) for _ in range(50)]),
        lambda: store.update_attempt(claimed.rollout_id, "latest", status="failed"),
        lambda: store.update_rollout(claimed.rollout_id, status="requeuing"),
        lambda: store.query_rollouts(status_in=["preparing"], sort_by="start_time", limit=10),
        lambda: store.query_events(after="0", limit=10),
        lambda: store.statistics(),
    ]
    for number, call in enumerate(calls):
        copies = 0
        await call()
        assert copies <= 12, number


async def test_no_primitive_of_the_file_walks_a_whole_table(tmp_path: Path) -> None:
    store = SQLiteLightningStore(tmp_path / "x.db", synchronous="NORMAL")
    claimed = await store.start_rollout("x", worker_id="w", run_id="r")
    span = span_of(claimed)
    await store.add_span(span)
    await store.close()
    connection = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    statements: list[str] = []
    connection.set_trace_callback(statements.append)
    link = SQLiteLink(connection)
    tx, rollout_id, attempt_id = SQLiteTx(link, Seen()), claimed.rollout_id, claimed.attempt.attempt_id
    tx.save(required(tx.load(rollout_id)))
    tx.claim("r", 1.0)
    tx.next_available("r")
    tx.due(1.0, 10)
    tx.held("w", 10)
    tx.any_held()
    tx.changes("0", 10)
    tx.span_bodies(rollout_id, None)
    tx.span_bodies(rollout_id, attempt_id)
    tx.span_bodies(rollout_id, None, span.span_id)
    tx.add_spans([span])
    tx.get("worker", "w")
    tx.find(Plan(status_in=["failed"], sort_by="start_time", limit=10))
    tx.find(Plan(run_id=("r",), sort_by="start_time", limit=10))
    tx.find(Plan(ids=[rollout_id]))
    tx.finish()
    connection.set_trace_callback(None)
    walks: list[str] = []
    for statement in statements:
        plan = [row[3] for row in connection.execute("EXPLAIN QUERY PLAN " + statement.replace("Inf", "1e999"))]
        walks += [f"{step}: {statement}" for step in plan if step.startswith("SCAN") and "USING" not in step]
    connection.close()
    assert [walk for walk in walks if "json_each" not in walk and not walk.startswith("SCAN (subquery")] == []


async def test_what_a_page_of_the_file_passes_over_is_read_from_an_index_alone(tmp_path: Path) -> None:
    await SQLiteLightningStore(tmp_path / "x.db").close()
    connection = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    statements: list[str] = []
    connection.set_trace_callback(statements.append)
    plans = [Plan(sort_by="start_time", limit=10, offset=30_000, run_id=run, descending=True) for run in (None, ("r",))]
    for plan in plans:
        SQLiteTx(SQLiteLink(connection)).find(plan)
    connection.set_trace_callback(None)
    steps = [
        row[3] for text in statements if "body" in text for row in connection.execute("EXPLAIN QUERY PLAN " + text)
    ]
    connection.close()
    read = [step for step in steps if "rollouts" in step and "PRIMARY KEY" not in step]
    assert len(read) == len(plans) * len(get_args(RolloutStatus))
    assert [step for step in read if "COVERING INDEX" not in step] == []
    # what reads the bodies passes over none: its page is chosen by number before
    assert [text for text in statements if "body" in text and not text.endswith("number")] == []


async def test_a_page_of_spans_is_in_order_and_reads_the_bodies_of_its_spans_only(tmp_path: Path) -> None:
    store = SQLiteLightningStore(tmp_path / "x.db")
    rollout = await store.start_rollout("x")
    numbers = [number * 7 % 20 // 2 for number in range(20)]
    spans = [span_of(rollout, str(n), number) for n, number in enumerate(numbers)]
    await store.add_many_spans(spans)
    await store.close()
    connection = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    statements: list[str] = []
    connection.set_trace_callback(statements.append)
    tx = SQLiteTx(SQLiteLink(connection))

    def names(*page: Any) -> list[str]:
        bodies, total = read_page(tx, rollout.rollout_id, None, None, *page)
        assert total == len(spans)
        return [span.name for span in decode_all(bodies, rollout.rollout_id)]

    ordered = [span.name for span in sorted(spans, key=lambda span: span.sequence_id)]
    turned = [span.name for span in sorted(spans, key=lambda span: span.sequence_id, reverse=True)]
    assert names(False, 3, 4) == ordered[4:7]
    [bodies] = [text for text in statements if text.startswith("SELECT number, body FROM spans")]
    steps = [row[3] for row in connection.execute("EXPLAIN QUERY PLAN " + bodies)]
    assert any("SEARCH spans USING INTEGER PRIMARY KEY" in step for step in steps)
    assert (names(True, 3, 4), names(False, 3, 18), names(False, 0, 0)) == (turned[4:7], ordered[18:], [])
    # the number of this one is not where it is looked for first
    spans.append(spans[0].model_copy(update={"attempt_id": "a" * 2000, "name": "far", "sequence_id": -1}))
    tx.add_spans(spans[-1:])
    assert names(False, 3, 0) == ["far", *ordered[:2]]
    connection.close()


# --- full, gone --------------------------------------------------------------------------------------------------


class Troubled(InMemoryLightningStore):
    """Raises the error that it is made with."""

    trouble: BaseException | None = None

    async def get_rollout_by_id(self, rollout_id: str) -> Any:
        if self.trouble is not None:
            raise self.trouble
        return await super().get_rollout_by_id(rollout_id)


@pytest.mark.parametrize(
    ("trouble", "code", "name", "header"),
    [
        (BusyError("full", retry_after=3.2), 429, "BusyError", "3"),
        (GoneError("evicted"), 410, "GoneError", None),
        (KeyError("internal"), 500, "KeyError", None),
    ],
)
async def test_trouble_of_the_store_has_its_status_and_never_a_traceback(
    serve: Serve, trouble: BaseException, code: int, name: str, header: str | None
) -> None:
    troubled = Troubled()
    troubled.trouble = trouble
    server, _ = await serve(troubled)
    url = f"{server.endpoint}{PREFIX}/rollouts/ro-1"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        body = await answer.json()
        assert (answer.status, body["error_type"], answer.headers.get("retry-after")) == (code, name, header)
        assert "Traceback" not in str(body)
    client = LightningStoreClient(server.endpoint, retry_delays=())
    with pytest.raises(RuntimeError if code != 429 else OSError):
        await client.get_rollout_by_id("ro-1")
    await client.close()
