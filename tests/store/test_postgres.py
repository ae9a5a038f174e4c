"""Features of the PostgreSQL store alone: locks and races, commits of many, errors for lost connections, its tables.

What every store does is in `conformance/`. Each test has a partition of its own in one server.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import logging
import random
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from agentlightning.errors import (
    BadRequestError,
    BusyError,
    ConflictError,
    StoreUnreachableError,
    StoreWriteError,
)
from agentlightning.store.base import request_token
from agentlightning.store.rules.tx import Record, TextRow, Tx
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, Rollout, Span
from tests.stubs.postgres_server import PostgresServer

if importlib.util.find_spec("psycopg") is None:
    pytest.skip("psycopg is not installed (pip install 'agl-framework[postgres]')", allow_module_level=True)

import psycopg

from agentlightning.store.postgres import PostgresLightningStore, link, listener, tx
from agentlightning.store.postgres import store as postgres_store
from agentlightning.store.rules.durable import SCHEMA_VERSION
from agentlightning.store.sql import backend as sql_backend
from agentlightning.store.sql import tx as sql_tx

Connection = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def partition() -> str:
    return uuid.uuid4().hex


@pytest.fixture
async def store(postgres_uri: str, partition: str) -> AsyncIterator[PostgresLightningStore]:
    made = PostgresLightningStore(postgres_uri, partition=partition)
    yield made
    await made.close()


@pytest.fixture
async def second_store(postgres_uri: str, partition: str) -> AsyncIterator[PostgresLightningStore]:
    """The same store as another process has it: with threads and connections of its own."""
    made = PostgresLightningStore(postgres_uri, partition=partition)
    yield made
    await made.close()


@pytest.fixture
def database(postgres_uri: str) -> Iterator[Connection]:
    """A connection of somebody else."""
    with psycopg.connect(postgres_uri, autocommit=True) as connection:
        yield connection


@pytest.fixture
def new_database(postgres_uri: str, database: Connection) -> Iterator[str]:
    """The URI of a database without tables."""
    name = f"agl_test_{uuid.uuid4().hex[:12]}"
    database.execute(f"CREATE DATABASE {name}".encode())
    yield f"{postgres_uri}{'&' if '?' in postgres_uri else '?'}dbname={name}"
    database.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def a_span(attempted: AttemptedRollout, span_id: str | None = None) -> Span:
    span = Span.from_attributes(
        attributes={"k": "v"},
        rollout_id=attempted.rollout_id,
        attempt_id=attempted.attempt.attempt_id,
        sequence_id=-1,
        name="step",
    )
    return span if span_id is None else span.model_copy(update={"span_id": span_id})


async def queue_some(store: PostgresLightningStore, count: int) -> list[Rollout]:
    return await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=index) for index in range(count)])


def run(store: PostgresLightningStore, script: Callable[[Tx], Any]) -> Any:
    """Run a script as the store's operations do, blocking."""
    return store._backend.execute(script)[0]


# --- one claim, one count --------------------------------------------------------------------------------------------


async def test_a_claimer_waits_for_no_other_and_never_takes_the_same(
    store: PostgresLightningStore, second_store: PostgresLightningStore
) -> None:
    queued = await queue_some(store, 2)
    claimed, go_on = threading.Event(), threading.Event()

    def claim_and_linger(tx: Tx) -> str:
        record = cast("Record", tx.claim(None, time.time()))
        claimed.set()
        assert go_on.wait(30)
        return record.rollout.rollout_id

    slow = asyncio.create_task(asyncio.to_thread(run, store, claim_and_linger))
    await asyncio.to_thread(claimed.wait, 30)
    other = await second_store.dequeue_rollout()
    third = await second_store.dequeue_rollout()
    go_on.set()
    assert other is not None
    assert third is None
    assert {await slow, other.rollout_id} == {rollout.rollout_id for rollout in queued}


async def test_a_request_that_arrives_many_times_at_once_is_done_once(
    store: PostgresLightningStore, second_store: PostgresLightningStore
) -> None:
    await queue_some(store, 20)
    request_token.set("the same")  # of this test's context only
    many = [each for each in (store, second_store) for _ in range(10)]
    made = await asyncio.gather(*(each.enqueue_rollout(input="new") for each in many))
    assert len({rollout.rollout_id for rollout in made}) == 1
    claims = await asyncio.gather(*(each.dequeue_rollout() for each in many))
    assert len({claim.attempt.attempt_id for claim in claims if claim is not None}) == 1
    assert (await store.statistics())["total_attempts"] == 1


# --- races -----------------------------------------------------------------------------------------------------------


async def test_a_script_is_run_again_when_what_it_read_has_changed(
    store: PostgresLightningStore, second_store: PostgresLightningStore
) -> None:
    def add_one(tx: Tx) -> None:
        row = cast("TextRow | None", tx.get("latest_resources", "counter"))
        tx.put("latest_resources", "counter", TextRow(str(int(row.value if row else "0") + 1)))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: run((store, second_store)[n % 2], add_one), range(80)))
    assert run(store, lambda tx: tx.get("latest_resources", "counter")) == TextRow("80")


async def test_a_row_that_is_dropped_while_it_changes_is_not_lost(
    store: PostgresLightningStore, second_store: PostgresLightningStore
) -> None:
    runs: list[object] = []

    def drop_what_is_old(tx: Tx) -> None:
        row = tx.get("latest_resources", "x")
        runs.append(row)
        if len(runs) == 1:
            run(second_store, lambda tx: tx.put("latest_resources", "x", TextRow("new")))
        if row == TextRow("old"):
            tx.drop("latest_resources", "x")

    run(store, lambda tx: tx.put("latest_resources", "x", TextRow("old")))
    run(store, drop_what_is_old)
    assert runs == [TextRow("old"), TextRow("new")]
    assert run(store, lambda tx: tx.get("latest_resources", "x")) == TextRow("new")


async def test_a_locked_rollout_keeps_nobody_else_waiting(store: PostgresLightningStore, database: Connection) -> None:
    locked, free = await store.start_rollout(input=1), await store.start_rollout(input=2)
    with database.transaction():
        database.execute("SELECT FROM agl_rollouts WHERE rollout_id = %s FOR UPDATE", (locked.rollout_id,))
        waits = [asyncio.create_task(store.add_span(a_span(locked))) for _ in range(5)]
        await asyncio.gather(*(store.add_span(a_span(free)) for _ in range(50)))
        assert not any(task.done() for task in waits)
    assert all(span is not None for span in await asyncio.gather(*waits))
    assert sorted(s.sequence_id for s in await store.query_spans(locked.rollout_id)) == [1, 2, 3, 4, 5]


async def test_changes_that_cross_do_not_wait_for_each_other_for_ever(
    store: PostgresLightningStore, second_store: PostgresLightningStore
) -> None:
    one, two = await store.start_rollout(input=1), await store.start_rollout(input=2)
    there = [(one.rollout_id, one.attempt.attempt_id), (two.rollout_id, two.attempt.attempt_id)]
    await asyncio.gather(
        *(
            each.get_many_span_sequence_ids(order)
            for each in (store, second_store)
            for order in (there, there[::-1]) * 20
        )
    )
    assert await store.get_many_span_sequence_ids(there) == [81, 81]


async def test_a_script_that_gets_no_lock_is_given_up_after_a_while(
    store: PostgresLightningStore, database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_store, "_PATIENCE_SECONDS", 0.3)
    rollout = await store.start_rollout(input=1)
    with database.transaction():
        database.execute("SELECT FROM agl_rollouts WHERE rollout_id = %s FOR UPDATE", (rollout.rollout_id,))
        with pytest.raises(BusyError, match=r"lock timeout.*Nothing of it was stored"):
            await store.add_span(a_span(rollout))
    assert await store.add_span(a_span(rollout)) is not None


async def test_a_process_that_is_frozen_in_a_transaction_loses_its_locks_and_goes_on_later(
    store: PostgresLightningStore, second_store: PostgresLightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = tuple(setting.replace("30s", "300ms") for setting in link._SETTINGS)
    monkeypatch.setattr(link, "_SETTINGS", short)
    (made,) = await queue_some(store, 1)
    loaded, woken, runs = threading.Event(), threading.Event(), itertools.count(1)

    def change_slowly(tx: Tx) -> int:
        record = cast("Record", tx.load(made.rollout_id))
        number = next(runs)
        if number == 1:
            loaded.set()
            assert woken.wait(30)
        record.spans_issued += 1
        tx.save(record)
        return number

    frozen = asyncio.create_task(asyncio.to_thread(run, store, change_slowly))
    await asyncio.to_thread(loaded.wait, 30)
    assert await second_store.get_many_span_sequence_ids([(made.rollout_id, "any")]) == [1]
    woken.set()
    assert await frozen == 2
    assert await second_store.get_many_span_sequence_ids([(made.rollout_id, "any")]) == [3]


async def test_spans_that_arrive_again_among_others_are_stored_once(
    store: PostgresLightningStore, second_store: PostgresLightningStore
) -> None:
    rollout, other = await store.start_rollout(input=1), await store.start_rollout(input=2)
    again = [a_span(rollout, f"{index % 5:016x}") for index in range(40)]
    calls = [(store, second_store)[n % 2].add_span(span) for n, span in enumerate(again)]
    calls += [store.add_span(a_span(other)) for _ in range(20)]
    stored = await asyncio.gather(*calls)
    assert sum(span is not None for span in stored[:40]) == 5
    assert all(span is not None for span in stored[40:])
    assert (await store.statistics())["total_spans"] == 25


# --- many in one transaction -----------------------------------------------------------------------------------------


async def test_a_script_that_raises_leaves_no_trace_and_disturbs_no_neighbour(store: PostgresLightningStore) -> None:
    def save_and_raise(tx: Tx, number: int) -> None:
        record = Record(Rollout(rollout_id=f"ro-bad{number}", input=None, start_time=1.0), queued_at=1.0)
        tx.save(record)
        tx.put("latest_resources", f"bad{number}", TextRow("x"))
        if number % 2:
            assert f"ro-bad{number}" in [r.rollout.rollout_id for r in (tx.claim(None, 2.0),) if r]  # sent early
        raise LookupError(number)

    good = [asyncio.create_task(store.enqueue_rollout(input=n)) for n in range(20)]
    bad = [
        asyncio.ensure_future(store._backend.run(lambda tx, n=n: save_and_raise(tx, n)))  # type: ignore[misc]
        for n in range(20)
    ]
    results = await asyncio.gather(*bad, return_exceptions=True)
    assert [type(result) for result in results] == [LookupError] * 20
    made = {rollout.rollout_id for rollout in await asyncio.gather(*good)}
    assert {rollout.rollout_id for rollout in await store.query_rollouts()} == made
    assert run(store, lambda tx: tx.scan("latest_resources")) == []


async def test_callers_beyond_the_bound_are_told_to_come_later(
    store: PostgresLightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_backend, "_MAX_WAITING", 3)
    go_on, begun = threading.Event(), threading.Event()

    def linger(tx: Tx) -> None:
        begun.set()
        assert go_on.wait(30)

    with ThreadPoolExecutor() as callers:
        callers.submit(run, store, linger)
        assert begun.wait(30)
        waiting = [asyncio.create_task(store._backend.run(lambda tx: tx.runs())) for _ in range(3)]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        with pytest.raises(BusyError, match="3 calls are waiting"):
            await store.enqueue_rollout(input="one too many")
        go_on.set()
    assert [runs for runs, _ in await asyncio.gather(*waiting)] == [[], [], []]


async def test_what_the_tables_cannot_hold_is_the_callers_error_alone(store: PostgresLightningStore) -> None:
    long = "".join(random.Random(1).choices("0123456789abcdef", k=100_000))
    calls = [store.update_worker("a\0b"), store.update_worker(long), *(store.update_worker(f"w{n}") for n in range(5))]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results[:2]] == [BadRequestError] * 2
    assert len(await store.query_workers()) == 5
    with pytest.raises(BadRequestError, match="NUL"):
        await store.get_worker_by_id("a\0b")


async def test_null_bytes_in_values_survive(store: PostgresLightningStore) -> None:
    made = await store.start_rollout(
        input={"text": "a\0b", "\0": ["\ud83d\ude00".encode("utf-16", "surrogatepass").hex()]}
    )
    rollout = await store.get_rollout_by_id(made.rollout_id)
    assert rollout is not None
    assert rollout.input["text"] == "a\0b"
    span = a_span(made)
    span.attributes["k"] = "\0"
    await store.add_span(span)
    assert (await store.query_spans(made.rollout_id))[0].attributes["k"] == "\0"


# --- changes and who waits for them ----------------------------------------------------------------------------------


async def test_a_change_is_told_after_every_one_that_began_earlier(
    store: PostgresLightningStore, database: Connection
) -> None:
    early, late = await queue_some(store, 2)
    cursor = (await store.query_events()).cursor
    with database.transaction():
        database.execute(
            "UPDATE agl_rollouts SET change = pg_current_xact_id() WHERE rollout_id = %s", (early.rollout_id,)
        )
        await store.update_rollout(late.rollout_id, status="cancelled")
        assert (await store.query_events(after=cursor)).events == []
        waiting = asyncio.create_task(store.query_events(after=cursor, timeout=60.0))
        await asyncio.sleep(0.05)
    page = await asyncio.wait_for(waiting, 30.0)
    assert [event.rollout_id for event in page.events] == [early.rollout_id, late.rollout_id]


async def test_changes_come_in_the_order_of_their_numbers_not_of_their_digits(
    store: PostgresLightningStore, database: Connection
) -> None:
    one, two = await queue_some(store, 2)
    for rollout, change in ((one, "100"), (two, "99")):
        database.execute("UPDATE agl_rollouts SET change = %s WHERE rollout_id = %s", (change, rollout.rollout_id))
    first = await store.query_events(after="0", limit=1)
    second = await store.query_events(after=first.cursor)
    assert [event.rollout_id for event in (*first.events, *second.events)] == [two.rollout_id, one.rollout_id]


@pytest.mark.parametrize("cursor", ["9000000000000.1", "-1", "1.2.3", "x", "", "1" * 30, "\u0661"])
async def test_a_cursor_of_another_store_is_refused(store: PostgresLightningStore, cursor: str) -> None:
    with pytest.raises(BadRequestError, match="not a cursor of this store"):
        await store.query_events(after=cursor)


async def test_changes_of_a_dump_that_was_loaded_are_told(
    store: PostgresLightningStore, database: Connection, postgres_uri: str, partition: str
) -> None:
    made = await store.enqueue_rollout(input=1)
    database.execute("UPDATE agl_rollouts SET change = '9000000000000' WHERE partition = %s", (partition,))
    opened = PostgresLightningStore(postgres_uri, partition=partition)
    page = await opened.query_events(after="0")
    await opened.close()
    assert [event.rollout_id for event in page.events] == [made.rollout_id]


async def test_only_changes_of_others_wake_the_listener(
    store: PostgresLightningStore, second_store: PostgresLightningStore
) -> None:
    def news() -> bool:
        return store._backend.await_change(0.2)

    assert await asyncio.to_thread(store._backend.await_change, 30.0), "what came before it listened is unknown"
    await store.enqueue_rollout(input=1)
    assert not await asyncio.to_thread(news)
    await second_store.enqueue_rollout(input=2)
    assert await asyncio.to_thread(store._backend.await_change, 30.0)
    assert not await asyncio.to_thread(news)


async def test_a_listener_that_nobody_asks_lets_its_connection_go(
    postgres_uri: str, partition: str, database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_IDLE_SECONDS", 0.2)
    store = PostgresLightningStore(f"{postgres_uri}&application_name=x{partition[:20]}", partition=partition)
    here = store._backend._process().listener  # type: ignore[attr-defined]
    assert await asyncio.to_thread(here.await_change, 30.0)
    thread = here._thread
    if thread is not None:
        await asyncio.to_thread(thread.join, 30.0)
    assert here._thread is None
    assert await asyncio.to_thread(here.await_change, 30.0), "it missed what happened in between"
    await store.close()


# --- connections that end --------------------------------------------------------------------------------------------


def cut(database: Connection, application: str) -> int:
    """End the connections of an application; returns how many there were."""
    query = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE application_name = %s"
    return len(database.execute(query, (application,)).fetchall())


@pytest.fixture
async def named(postgres_uri: str, partition: str) -> AsyncIterator[PostgresLightningStore]:
    """A store whose connections have the name of its partition."""
    joint = "&" if "?" in postgres_uri else "?"
    made = PostgresLightningStore(f"{postgres_uri}{joint}application_name={partition}", partition=partition)
    yield made
    await made.close()


async def test_connections_that_were_cut_while_idle_are_made_again(
    named: PostgresLightningStore, database: Connection, partition: str
) -> None:
    await asyncio.gather(*(named.enqueue_rollout(input=n) for n in range(10)))
    await named.query_rollouts()
    assert cut(database, partition) >= 2
    await asyncio.gather(*(named.enqueue_rollout(input=n) for n in range(10)))
    assert cut(database, partition) >= 1
    assert len(await named.query_rollouts()) == 20


async def test_a_script_whose_connection_is_cut_before_the_commit_is_run_again(
    named: PostgresLightningStore, database: Connection, partition: str
) -> None:
    runs: list[str] = []

    def script(tx: Tx) -> None:
        runs.append("run")
        tx.get("latest_resources", "x")
        if len(runs) == 1:
            cut(database, partition)
        tx.get("latest_resources", "y")
        tx.put("latest_resources", "x", TextRow("once"))

    await asyncio.to_thread(run, named, script)
    assert runs == ["run", "run"]
    assert run(named, lambda tx: tx.scan("latest_resources")) == [("x", TextRow("once"))]


async def test_a_lost_answer_to_a_commit_is_said_and_the_next_call_works(
    named: PostgresLightningStore, database: Connection, partition: str, caplog: pytest.LogCaptureFixture
) -> None:
    die = f"die_{partition[:12]}"
    database.execute(
        f"CREATE FUNCTION {die}() RETURNS trigger LANGUAGE plpgsql"
        " AS 'BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END'".encode()
    )
    database.execute(
        f"CREATE CONSTRAINT TRIGGER {die} AFTER INSERT ON agl_rollouts DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"
        f" WHEN (NEW.partition = '{partition}') EXECUTE FUNCTION {die}()".encode()
    )
    try:
        with (
            pytest.raises(StoreUnreachableError, match="It is unknown whether the call was stored"),
            caplog.at_level("WARNING"),
        ):
            await named.enqueue_rollout(input=1)
    finally:
        database.execute(f"DROP FUNCTION {die} CASCADE".encode())
    assert "lost during a commit" in caplog.text
    made = await named.enqueue_rollout(input=2)
    assert [rollout.rollout_id for rollout in await named.query_rollouts()] == [made.rollout_id]


async def test_a_server_that_stays_away_is_said_with_what_became_of_the_call(
    postgres_server: PostgresServer, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_backend, "OUTAGE_SECONDS", 0.2)
    store = PostgresLightningStore(postgres_server.uri, partition=partition)
    await store.enqueue_rollout(input=1)
    await asyncio.to_thread(postgres_server.stop)
    try:
        with pytest.raises(StoreWriteError, match="Nothing of this call was stored"):
            await store.enqueue_rollout(input=2)
        with pytest.raises(StoreUnreachableError, match="is the server running"):
            await store.query_rollouts()
        with pytest.raises(StoreUnreachableError, match="Is the server running there"):
            PostgresLightningStore(postgres_server.uri, partition=partition)
    finally:
        await asyncio.to_thread(postgres_server.start)
    await store.enqueue_rollout(input=3)
    assert [rollout.input for rollout in await store.query_rollouts()] == [1, 3]
    await store.close()


async def test_partitions_do_not_see_each_other(
    store: PostgresLightningStore, postgres_uri: str, partition: str
) -> None:
    other = PostgresLightningStore(postgres_uri, partition=partition + "'; --")
    request_token.set("the same")  # of this test's context only
    for each in (store, other):
        made = await each.enqueue_rollout(input="x")
        await each.update_worker("w")
        await each.add_resources({})
    assert [(await each.statistics())["total_rollouts"] for each in (store, other)] == [1, 1]
    assert await store.dequeue_rollout() is not None
    assert await store.delete_rollouts(rollout_ids=[made.rollout_id], force=True) == 1
    assert len(await other.query_rollouts()) == len(await other.query_workers()) == 1
    await other.close()


# --- tables ----------------------------------------------------------------------------------------------------------


def test_many_may_open_a_new_database_at_once(new_database: str) -> None:
    with ThreadPoolExecutor(8) as threads:
        stores = list(threads.map(lambda n: PostgresLightningStore(new_database), range(8)))
    for store in stores:
        asyncio.run(store.close())
    with psycopg.connect(new_database) as database:
        assert database.execute("SELECT version FROM agl_schema").fetchall() == [(SCHEMA_VERSION,)]


def test_tables_that_may_not_be_made_are_said(new_database: str, database: Connection) -> None:
    role = f"agl_test_{uuid.uuid4().hex[:12]}"
    database.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'top secret'".encode())
    try:
        with psycopg.connect(new_database, autocommit=True) as inside:
            inside.execute(b"REVOKE CREATE ON SCHEMA public FROM public")
        uri = f"{new_database}&user={role}&password=top%20secret"
        with pytest.raises(ConflictError, match="needs permission to create tables") as caught:
            PostgresLightningStore(uri)
        assert "secret" not in "".join(traceback.format_exception(caught.value))
    finally:
        database.execute(f"DROP ROLE {role}".encode())


@pytest.mark.parametrize(
    ("index", "query", "values"),
    [
        ("agl_rollouts_queue", sql_tx.claim_query(None)[0], (1.0,)),
        ("agl_rollouts_queue", sql_tx.claim_query("r")[0], ("r", 1.0)),
        ("agl_rollouts_change", tx._CHANGES, ("5", 1, 100)),
        ("agl_rollouts_deadline", sql_tx.DUE, (1.0, 100)),
        ("agl_rollouts_worker", sql_tx.HELD, ("w", 100)),
        ("agl_rows_number", sql_tx.SCAN, ("worker", 100)),
    ],
)
def test_what_is_asked_most_is_read_from_an_index_in_its_order(
    new_database: str, index: str, query: str, values: tuple[Any, ...]
) -> None:
    asyncio.run(PostgresLightningStore(new_database).close())
    with psycopg.connect(new_database) as inside:
        inside.execute("SET enable_seqscan = off")
        inside.execute("SET enable_sort = off")  # a table that is empty is as soon sorted
        inside.execute("SET enable_bitmapscan = off")
        text = "\n".join(line for (line,) in inside.execute(b"EXPLAIN " + link.renderer(inside, "p")(query), values))
    assert index in text
    assert "Sort" not in text


# --- secrets and what is missing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "error"),
    [
        ("postgresql://anna:top-secret@127.0.0.1:1/x", StoreUnreachableError),
        ("postgresql://127.0.0.1:1/x?user=anna&password=top-secret", StoreUnreachableError),
        ("postgresql://anna:top-secret%zz@127.0.0.1:1/x", BadRequestError),
        ("postgres://anna:top-secret@127.0.0.1:1/x?no_such_option=1", BadRequestError),
        ("host=127.0.0.1 password=top-secret", BadRequestError),
        ("top-secret", BadRequestError),
    ],
)
def test_the_password_is_in_no_error_and_in_no_log(
    uri: str, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(error) as caught:
        PostgresLightningStore(uri)
    assert "secret" not in "".join(traceback.format_exception(caught.value)) + caplog.text
    if error is StoreUnreachableError:
        assert "postgresql://anna@127.0.0.1:1/x" in str(caught.value)


@pytest.mark.parametrize("partition", ["", "a\0b"])
def test_a_partition_has_a_name(partition: str) -> None:
    with pytest.raises(BadRequestError, match="partition must be"):
        PostgresLightningStore("postgresql://127.0.0.1:1/x", partition=partition)


def test_without_the_driver_the_error_says_what_to_install() -> None:
    command = "import sys; sys.modules['psycopg'] = None; import agentlightning as agl; agl.PostgresLightningStore"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=False)
    assert "pip install 'agl-framework[postgres]'" in done.stderr
