"""Features of the MongoDB store alone: its order of writes, its numbers, its indexes, its client.

What every store does is in `conformance/`. Each test has a partition of its own in one server.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import BadRequestError, ConflictError, StoreUnreachableError, TooLargeError
from agentlightning.store.base import request_token
from agentlightning.store.rules.claims import claim
from agentlightning.store.rules.deletion import delete
from agentlightning.store.rules.enqueue import enqueue
from agentlightning.store.rules.query import sortable_fields
from agentlightning.store.rules.resources import publish
from agentlightning.store.rules.spans import add_spans
from agentlightning.store.rules.tx import ClaimRow, Tx
from agentlightning.store.rules.updates import update_attempt
from agentlightning.store.spec import store_from_spec
from agentlightning.types import LLM, AttemptedRollout, EnqueueRolloutRequest, PromptTemplate, Rollout, Span
from agentlightning.utils.backoff import Outage
from tests.stubs.mongo_server import MongoServer

if importlib.util.find_spec("pymongo") is None:
    pytest.skip("pymongo is not installed (pip install 'agl-framework[mongo]')", allow_module_level=True)

import pymongo
from pymongo import monitoring

from agentlightning.store.mongo import MongoBackend, MongoLightningStore, link
from agentlightning.store.mongo import flush as mongo_flush
from agentlightning.store.mongo import tx as mongo_tx
from agentlightning.store.mongo.change_numbers import FOREIGN_SECONDS, Horizon
from agentlightning.store.mongo.check import check_partition
from agentlightning.store.mongo.link import Place
from agentlightning.store.mongo.schema import Partition


@pytest.fixture
def partition() -> str:
    return uuid.uuid4().hex


@pytest.fixture
async def store(mongo_uri: str, partition: str) -> AsyncIterator[MongoLightningStore]:
    made = MongoLightningStore(mongo_uri, partition_id=partition)
    yield made
    await made.close()


@pytest.fixture
async def second_store(mongo_uri: str, partition: str) -> AsyncIterator[MongoLightningStore]:
    """The same store as another process has it: with a client and numbers of its own."""
    made = MongoLightningStore(mongo_uri, partition_id=partition)
    yield made
    await made.close()


@pytest.fixture
def database(mongo_uri: str) -> Iterator[Any]:
    with pymongo.MongoClient[Any](mongo_uri) as client:
        yield client["agentlightning"]


def a_span(attempted: AttemptedRollout, span_id: str | None = None, **fields: Any) -> Span:
    span = Span.from_attributes(
        attributes=fields.pop("attributes", {"k": "v"}),
        rollout_id=attempted.rollout_id,
        attempt_id=attempted.attempt.attempt_id,
        sequence_id=-1,
        **fields,
    )
    return span if span_id is None else span.model_copy(update={"span_id": span_id})


# --- one claim, one count -------------------------------------------------------------------------------------------


@pytest.mark.heavy
def test_threads_and_processes_claim_each_rollout_once(mongo_uri: str, partition: str) -> None:
    count = 500
    store = MongoLightningStore(mongo_uri, partition_id=partition)
    asyncio.run(store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(count)]))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        others = pool.starmap_async(_claim_all, [(mongo_uri, partition)] * 2)
        claims: list[str] = []
        threads = [threading.Thread(target=lambda: claims.extend(asyncio.run(_drain(store)))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for ids in others.get(60):
            claims.extend(ids)
    asyncio.run(store.close())
    assert len(claims) == len(set(claims)) == count


async def _drain(store: MongoLightningStore) -> list[str]:
    ids: list[str] = []
    while (claim := await store.dequeue_rollout(worker_id="w")) is not None:
        ids.append(claim.rollout_id)
    return ids


def _claim_all(uri: str, partition: str) -> list[str]:
    async def work() -> list[str]:
        store = MongoLightningStore(uri, partition_id=partition)
        ids = await _drain(store)
        await store.close()
        return ids

    return asyncio.run(work())


async def test_a_request_that_arrives_many_times_at_once_is_answered_once(
    store: MongoLightningStore, second_store: MongoLightningStore
) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(20)])
    request_token.set("the same")  # of this test's context only
    claims = await asyncio.gather(*[(store, second_store)[i % 2].dequeue_many_rollouts(limit=3) for i in range(8)])
    assert len({claim.rollout_id for many in claims for claim in many}) == 3
    assert (await store.statistics())["total_attempts"] == 3


async def test_spans_that_arrive_twice_at_once_are_counted_once(
    store: MongoLightningStore, second_store: MongoLightningStore
) -> None:
    attempted = await store.start_rollout("x")
    spans = [a_span(attempted, f"s{i}") for i in range(5)]
    answers = await asyncio.gather(*[(store, second_store)[i % 2].add_many_spans(spans) for i in range(4)])
    assert sorted(map(len, answers)) == [0, 0, 0, 5]
    counts = await store.statistics()
    stored = await store.query_spans(attempted.rollout_id)
    assert (counts["total_spans"], [span.sequence_id for span in stored]) == (5, [1, 2, 3, 4, 5])


async def test_many_writers_of_one_rollout_lose_no_change(
    store: MongoLightningStore, second_store: MongoLightningStore
) -> None:
    attempted = await store.start_rollout("x")
    await asyncio.gather(*[(store, second_store)[i % 2].add_span(a_span(attempted)) for i in range(24)])
    stored = await store.query_spans(attempted.rollout_id)
    assert [span.sequence_id for span in stored] == list(range(1, 25))


async def test_a_heartbeat_and_a_claim_at_once_lose_nothing_of_the_workers_row(
    store: MongoLightningStore, second_store: MongoLightningStore
) -> None:
    for i in range(10):
        await store.enqueue_rollout(i)
        claim, worker = await asyncio.gather(store.dequeue_rollout("w"), second_store.update_worker("w", {"beat": i}))
        assert claim is not None
        row = await store.get_worker_by_id("w")
        assert row is not None
        assert (row.status, row.current_rollout_id, row.heartbeat_stats) == ("busy", claim.rollout_id, {"beat": i})
        assert row.last_heartbeat_time == worker.last_heartbeat_time


async def test_a_token_that_is_renewed_while_old_ones_are_removed_stays(
    store: MongoLightningStore, second_store: MongoLightningStore
) -> None:
    await asyncio.gather(store.statistics(), second_store.statistics())  # the first operation of each connects
    old, renewed = ClaimRow([], 1.0), ClaimRow([], 2.0, renewed=True)
    store._backend.execute(lambda tx: [tx.put("claim", token, old) for token in ("renewed", "old")])

    def remove_old_ones(tx: Tx) -> None:
        assert {token for token, _ in tx.scan("claim", 10)} == {"renewed", "old"}
        second_store._backend.execute(lambda other: other.put("claim", "renewed", renewed))
        tx.drop("claim", "renewed")
        tx.drop("claim", "old")

    store._backend.execute(remove_old_ones)
    rows, _ = second_store._backend.execute(lambda tx: [tx.get("claim", token) for token in ("renewed", "old")])
    assert rows == [renewed, None]


# --- death in the middle --------------------------------------------------------------------------------------------


def _steps() -> dict[str, Callable[[Tx], Any]]:
    """The life of three rollouts; every step carries its token and may be repeated."""
    requests = [EnqueueRolloutRequest(input=i) for i in range(3)]
    prompt = {"p": PromptTemplate(template="", engine="jinja")}
    spans = [_numbered_span(f"ro-{i % 2}", f"at-{i % 2}", i) for i in range(5)]
    return {
        "publish": lambda tx: publish(tx, 1.0, "r", "t1", prompt, None),
        "publish again": lambda tx: publish(tx, 2.0, "r", "t2", prompt, None),
        "enqueue": lambda tx: enqueue(tx, 3.0, str, requests),
        "claim": lambda tx: claim(tx, 4.0, str, "t3", None, "w", 2),
        "add spans": lambda tx: add_spans(tx, 5.0, spans),
        "end": lambda tx: update_attempt(tx, 6.0, "ro-0", "at-0", {"status": "succeeded"}),
        "fail": lambda tx: update_attempt(tx, 7.0, "ro-1", "at-1", {"status": "failed"}),
        "delete": lambda tx: delete(tx, 8.0, ["ro-0", "ro-1"], "force"),
    }


def _numbered_span(rollout_id: str, attempt_id: str, number: int) -> Span:
    span = Span.from_attributes(attributes={}, rollout_id=rollout_id, attempt_id=attempt_id, sequence_id=-1)
    return span.model_copy(update={"span_id": f"s{number}"})


def _contents(backend: MongoBackend) -> Any:
    """Return all rows but the workers', which repeat the attempts', and the rollouts that can still be claimed."""

    def read(tx: Tx) -> Any:
        records = [tx.load(f"ro-{n}") for n in range(3)]
        for record in records:
            if record is not None:
                record.spans_issued = 0  # numbers that were given out and not used are no loss
        spans = [tx.span_bodies(f"ro-{n}", None) for n in range(3)]
        kinds = ("resources", "resources_version", "latest_resources", "claim")
        return records, spans, [tx.scan(kind) for kind in kinds], tx.counts(), tx.held("w", 9)  # type: ignore[arg-type]

    there = repr(backend.execute(read, write=False)[0])
    claims = backend.execute(lambda tx: claim(tx, 9.0, lambda n: f"z{n}", None, None, None, 10))[0]
    return there, [rollout.rollout_id for rollout, _ in claims.claims]


class _Killer(monitoring.CommandListener):
    """Counts the commands that go out; ends the process before the one with number `kill_at`."""

    def __init__(self, kill_at: float = float("inf")) -> None:
        self.kill_at = kill_at
        self.sent = -1
        """Number of commands sent; -1 before the count begins."""

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        if self.sent >= 0:
            if self.sent >= self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.sent += 1

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        pass

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        pass


def _in_a_fork(work: Callable[[], Any]) -> Any:
    """Return what `work` returns in a process of its own; None if that was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            with os.fdopen(writer, "wb") as answer:
                pickle.dump(work(), answer)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        data = answer.read()
    os.waitpid(child, 0)
    return pickle.loads(data) if data else None


def die_at_every_command(uri: str) -> None:
    """For every command that a step sends: die before it, repeat the step, compare. Prints how often it died."""
    steps = list(_steps().items())
    mongo_tx.LEASE_SECONDS = mongo_flush.LEASE_SECONDS = mongo_tx.SETTLE_SECONDS = 0.3

    def live(partition: str, until: int) -> None:
        backend = MongoBackend(Place(uri), "agentlightning", partition)
        for _, step in steps[:until]:
            backend.execute(step)
        backend.close()

    def one_step(partition: str, number: int, killer: _Killer) -> int:
        backend = MongoBackend(Place(uri, {"event_listeners": [killer]}), "agentlightning", partition)
        killer.sent = 0
        backend.execute(steps[number][1])
        return killer.sent

    def repeat(partition: str, number: int) -> Any:
        backend = MongoBackend(Place(uri), "agentlightning", partition)
        backend.execute(steps[number][1])
        contents = _contents(backend)
        backend.close()
        with pymongo.MongoClient[Any](uri) as client:
            spans = Partition(client["agentlightning"], partition).spans
            return *contents, spans.count_documents({"partition": partition})

    def check(number: int) -> int:
        whole = uuid.uuid4().hex
        _in_a_fork(lambda: live(whole, number))
        commands: int = _in_a_fork(lambda: one_step(whole, number, _Killer()))
        expected = _in_a_fork(lambda: repeat(whole, number))
        dead = [uuid.uuid4().hex for _ in range(commands)]
        _in_a_fork(lambda: [live(partition, number) for partition in dead])
        for k, partition in enumerate(dead):
            assert _in_a_fork(partial(one_step, partition, number, _Killer(k))) is None
        time.sleep(0.3)  # what the dead had leased or begun is left alone for so long
        contents = _in_a_fork(lambda: [repeat(partition, number) for partition in dead])
        for k in range(commands):
            assert contents[k] == expected, f"{steps[number][0]}, dead before command {k}:\n{contents[k]}\n{expected}"
        return commands

    print(*(check(number) for number in range(len(steps))))


@pytest.mark.heavy
def test_a_process_that_dies_between_any_two_commands_leaves_what_a_repeated_token_completes(mongo_uri: str) -> None:
    command = "import sys; from tests.store.test_mongo import die_at_every_command; die_at_every_command(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", command, mongo_uri], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sum(map(int, done.stdout.split())) > 40


# --- what others change ---------------------------------------------------------------------------------------------


def test_a_change_of_this_process_holds_back_those_behind_it_until_it_is_written() -> None:
    horizon = Horizon()
    horizon.allocated(1, 2, now=0.0)
    horizon.allocated(3, 3, now=0.0)
    horizon.finished(3, 0.0, sure=True)
    assert horizon.visible(0.0, 0, ()) == 0
    horizon.finished(1, 0.0, sure=True)
    assert horizon.visible(0.0, 0, ()) == 3


def test_a_change_of_another_process_is_waited_for_until_it_shows_or_a_second_has_passed() -> None:
    horizon = Horizon()
    horizon.observe(4, now=0.0)
    assert (horizon.visible(0.1, 0, ()), horizon.unsure(0.1)) == (0, True)
    assert horizon.visible(0.1, 0, {1, 2, 4}) == 2
    assert horizon.visible(0.1, 2, {3, 4}) == 4
    assert (horizon.visible(FOREIGN_SECONDS, 0, ()), horizon.unsure(FOREIGN_SECONDS)) == (4, False)


def test_a_change_whose_fate_is_unknown_is_waited_for_like_that_of_another_process() -> None:
    horizon = Horizon()
    horizon.allocated(1, 1, now=0.0)
    horizon.finished(1, 5.0, sure=False)
    assert horizon.visible(5.0, 0, ()) == 0
    assert horizon.visible(5.0 + FOREIGN_SECONDS, 0, ()) == 1


async def test_a_waiting_claim_hears_of_work_from_another_process(
    store: MongoLightningStore, second_store: MongoLightningStore
) -> None:
    waiting = asyncio.create_task(store.dequeue_rollout("w", timeout=20.0))
    await asyncio.sleep(0.1)
    queued = await second_store.enqueue_rollout("x")
    claim = await asyncio.wait_for(waiting, 10.0)
    assert claim is not None
    assert claim.rollout_id == queued.rollout_id


async def test_where_the_server_tells_of_changes_it_is_listened_to(
    store: MongoLightningStore, second_store: MongoLightningStore
) -> None:
    store.connect()
    here = store._backend._process()  # type: ignore[attr-defined]
    if os.environ.get("AGL_TEST_MONGO_URI") and not here._streams:
        pytest.skip("a single server tells nobody of changes")
    here._streams = True  # the stub tells of them without saying so
    waiting = asyncio.create_task(store.dequeue_rollout("w", timeout=20.0))
    await asyncio.sleep(0.1)
    await second_store.enqueue_rollout("x")
    assert await asyncio.wait_for(waiting, 10.0) is not None
    assert here._stream is not None


async def test_a_reader_of_events_misses_nothing_of_what_several_processes_change_at_once(
    store: MongoLightningStore, second_store: MongoLightningStore, mongo_uri: str, partition: str
) -> None:
    reader = MongoLightningStore(mongo_uri, partition_id=partition)
    ended: set[str] = set()

    async def change(by: MongoLightningStore) -> None:
        for i in range(15):
            attempted = await by.start_rollout(i)
            await by.update_attempt(attempted.rollout_id, "latest", status="succeeded")
            ended.add(attempted.rollout_id)

    async def read() -> set[str]:
        event_ids, cursor = set[str](), "0"
        while len(event_ids) < 60:
            page = await reader.query_events(after=cursor, limit=7, timeout=1.0)
            event_ids.update(event.rollout_id for event in page.events if event.status == "succeeded")
            cursor = page.cursor
        return event_ids

    event_ids, *_ = await asyncio.wait_for(
        asyncio.gather(read(), *[change((store, second_store)[i % 2]) for i in range(4)]), 60
    )
    await reader.close()
    assert event_ids == ended


async def test_a_new_process_begins_with_the_present(
    store: MongoLightningStore, mongo_uri: str, partition: str
) -> None:
    made = [await store.enqueue_rollout(i) for i in range(3)]
    late = MongoLightningStore(mongo_uri, partition_id=partition)
    cursor = (await late.query_events()).cursor
    assert (await late.query_events(after=cursor)).events == []
    await store.update_rollout(made[0].rollout_id, status="cancelled")
    page = await late.query_events(after=cursor, timeout=10.0)
    await late.close()
    assert [(event.rollout_id, event.status) for event in page.events] == [(made[0].rollout_id, "cancelled")]


# --- the server -----------------------------------------------------------------------------------------------------


def test_an_index_for_every_query_begins_with_the_partition(store: MongoLightningStore, database: Any) -> None:
    store.connect()
    firsts = {
        name: [next(iter(index["key"])) for index in database[name].list_indexes()]
        for name in ("agl_rollouts", "agl_spans", "agl_rows")
    }
    assert {first for fields in firsts.values() for first in fields} == {"_id", "partition", "deleted"}
    assert [firsts["agl_rollouts"].count(name) for name in ("_id", "deleted")] == [1, 1]
    unique = [list(index["key"]) for index in database["agl_spans"].list_indexes() if index.get("unique")]
    assert ["partition", "rollout_id", "span_id", "attempt_id"] in unique


async def test_a_document_has_every_field_by_which_rollouts_are_sorted(
    store: MongoLightningStore, database: Any, partition: str
) -> None:
    await store.enqueue_rollout("x")
    assert set(sortable_fields(Rollout)) <= set(database["agl_rollouts"].find_one({"partition": partition}))


def test_many_processes_may_open_a_new_database_at_once(mongo_uri: str) -> None:
    name = f"agl_test_{uuid.uuid4().hex}"
    made: list[MongoLightningStore] = []

    def open_one() -> None:
        store = MongoLightningStore(mongo_uri, database_name=name)
        store.connect()
        made.append(store)

    threads = [threading.Thread(target=open_one) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for store in made:
        asyncio.run(store.close())
    with pymongo.MongoClient[Any](mongo_uri) as client:
        client.drop_database(name)
    assert len(made) == 6


async def test_partitions_do_not_see_each_other_whatever_their_names(mongo_uri: str, partition: str) -> None:
    one = MongoLightningStore(mongo_uri, partition_id=f"{partition}/a")
    two = MongoLightningStore(mongo_uri, partition_id=partition)
    queued = await one.enqueue_rollout("x")
    assert await two.get_rollout_by_id(f"a/{queued.rollout_id}") is None
    assert await two.get_rollout_by_id(queued.rollout_id) is None
    assert await two.dequeue_rollout() is None
    assert (await two.statistics())["total_rollouts"] == 0
    await one.close()
    await two.close()


async def test_a_span_comes_back_as_it_was_with_nothing_of_the_databases(store: MongoLightningStore) -> None:
    attempted = await store.start_rollout("x")
    plain = a_span(attempted, attributes={"big": 2**80, "text": "a\0b é 😀", "a.b": 1, "$c": True})
    span = Span.model_validate({**plain.model_dump(), "vendor": {"deep": [1]}})
    await store.add_span(span)
    [stored] = await store.query_spans(attempted.rollout_id)
    assert stored == span.model_copy(update={"sequence_id": 1})
    assert stored.model_extra == {"vendor": {"deep": [1]}}


async def test_ids_are_searched_for_as_text_and_with_their_case(store: MongoLightningStore) -> None:
    rollout = await store.enqueue_rollout("x")
    for part, count in (("ro-", 1), ("RO-", 0), ("r.-", 0), ("(", 0), ("\0", 0), (rollout.rollout_id[3:], 1)):
        assert (await store.query_rollouts(rollout_id_contains=part)).total == count


async def test_what_does_not_fit_into_a_document_is_refused_with_its_size(
    store: MongoLightningStore,
) -> None:
    big = "x" * (17 * 1024 * 1024)
    with pytest.raises(
        TooLargeError, match=r"Rollout ro-\w+ .*takes 178\d+ bytes; the limit for a MongoDB document is"
    ):
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input="small"), EnqueueRolloutRequest(input=big)])
    attempted = await store.start_rollout("y")
    with pytest.raises(TooLargeError, match=r"Span .* of rollout"):
        await store.add_span(a_span(attempted, attributes={"big": big}))
    counts = await store.statistics()
    assert (counts["total_rollouts"], counts["total_spans"]) == (1, 0)


@pytest.mark.slow
async def test_a_store_goes_on_when_the_server_was_killed_and_is_back(tmp_path: Path) -> None:
    with MongoServer(tmp_path) as server:
        store = MongoLightningStore(server.uri, mongo_client_kwargs={"serverSelectionTimeoutMS": 300})
        queued = await store.enqueue_rollout("x")
        server.kill()
        with pytest.raises(StoreUnreachableError, match="cannot be reached"):
            await store.dequeue_rollout()
        server.start()
        claim = await store.dequeue_rollout()
        assert claim is not None
        assert claim.rollout_id == queued.rollout_id
        await store.close()


@pytest.mark.slow
async def test_calls_wait_for_a_server_that_is_away_as_long_as_for_any_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(link._DEFAULTS, "serverSelectionTimeoutMS", 100)
    tried, failed = threading.Semaphore(0), Outage.failed

    def count(self: Outage, began: float) -> bool:
        tried.release()
        return failed(self, began)

    monkeypatch.setattr(Outage, "failed", count)
    with MongoServer(tmp_path) as server:
        store = MongoLightningStore(server.uri)
        queued = await store.enqueue_rollout("x")
        server.kill()
        enqueued = asyncio.create_task(store.enqueue_rollout("y"))
        listed = asyncio.create_task(store.query_rollouts(rollout_id_in=[queued.rollout_id]))
        assert await asyncio.to_thread(lambda: all(tried.acquire(timeout=60) for _ in range(6)))
        assert not enqueued.done()
        assert not listed.done()
        await asyncio.to_thread(server.start)
        made, page = await asyncio.wait_for(enqueued, 60), await asyncio.wait_for(listed, 60)
        assert _ids(page) == [queued.rollout_id]
        assert _ids(await store.query_rollouts()) == [queued.rollout_id, made.rollout_id]
        monkeypatch.setattr(store._backend._place, "outage_seconds", 0.2)  # type: ignore[attr-defined]
        server.kill()
        for call in (store.enqueue_rollout("z"), store.query_rollouts()):
            with pytest.raises(StoreUnreachableError, match="Check that the server runs"):
                await call
        await store.close()


def _ids(page: Iterable[Rollout]) -> list[str]:
    return [rollout.rollout_id for rollout in page]


# --- the client -----------------------------------------------------------------------------------------------------


async def test_the_first_operation_connects(tmp_path: Path) -> None:
    server = MongoServer(tmp_path)
    store = MongoLightningStore(uri=server.uri, database="db", collection="spans", thread_safe=True)
    copy = pickle.loads(pickle.dumps(store))
    with server:  # only here
        queued = await copy.enqueue_rollout("x")
        claim = await store.dequeue_rollout()
        assert claim.rollout_id == queued.rollout_id
        assert abs(claim.attempt.start_time - time.time()) < 60
        await store.close()
        await copy.close()


async def test_a_collection_is_that_of_the_spans_and_stays_it(mongo_uri: str, partition: str, database: Any) -> None:
    store = MongoLightningStore(mongo_uri, partition_id=partition, collection="spans")
    started = await store.start_rollout("x")
    await store.add_many_spans([a_span(started), a_span(started)])
    mine = {"partition": partition}
    assert (database["spans"].count_documents(mine), database["agl_spans"].count_documents(mine)) == (2, 0)
    assert (await store.query_spans(started.rollout_id)).total == 2
    other = MongoLightningStore(mongo_uri, partition_id=partition)
    with pytest.raises(ConflictError, match="are in the collection 'spans', not in 'agl_spans'; open it with"):
        await other.query_rollouts()
    await other.close()
    assert check_partition(mongo_uri, partition).spans == 2
    await store.delete_rollouts(rollout_ids=[started.rollout_id], force=True)
    assert database["spans"].count_documents(mine) == 0
    await store.close()


async def test_a_server_that_is_not_there_is_an_error_soon_and_the_password_stays_secret() -> None:
    uri = "mongodb://anna:top%3Asecret@127.0.0.1:1/x?serverSelectionTimeoutMS=300"
    store = MongoLightningStore(uri)
    with pytest.raises(StoreUnreachableError) as caught:
        await store.enqueue_rollout("x")
    await store.close()
    with pytest.raises(StoreUnreachableError):
        store_from_spec(uri)
    text = f"{caught.value}{caught.value!r}{caught.value.__cause__!r}"
    assert "mongodb://anna@127.0.0.1:1" in text
    assert "refused" in text
    assert "secret" not in text


@pytest.mark.parametrize(
    "uri",
    [
        *("mongodb://anna:se/cret@host", "mongodb://anna:s@ecret@host", "mongodb://anna:secret@host:none"),
        *("mongodb://h/?secret=1", "mongodb://h/?w=0", "redis://secret", "mongodb://"),
    ],
)
def test_a_wrong_uri_is_refused_without_being_shown(uri: str) -> None:
    with pytest.raises(BadRequestError, match=r"mongodb://user:password@host|w=0|secret=1|Unknown option") as caught:
        MongoLightningStore(uri)
    assert "anna" not in str(caught.value)
    assert caught.value.__cause__ is None


async def test_no_log_shows_what_is_stored(store: MongoLightningStore, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        await store.add_resources({"llm": LLM(endpoint="http://x", model="m", api_key="planted")})
    assert "planted" not in caplog.text


async def test_each_name_of_an_argument_is_understood(mongo_uri: str, partition: str) -> None:
    store = MongoLightningStore(uri=mongo_uri, database="agl_test", partition_id=partition, thread_safe=True)
    assert (store.database_name, store.partition_id) == ("agl_test", partition)
    copy = pickle.loads(pickle.dumps(store))
    queued = await store.enqueue_rollout("x")
    claim = await copy.dequeue_rollout()
    assert claim.rollout_id == queued.rollout_id
    await store.close()
    await copy.close()
    with pytest.raises(ConflictError, match="closed"):
        await store.enqueue_rollout("x")
    named = MongoLightningStore(mongo_uri=f"{mongo_uri.partition('?')[0].rstrip('/')}/agl_test")
    assert (named.database_name, named.partition_id) == ("agl_test", "default")
    await named.close()


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"collection": "agl_rollouts"}, "collection='agl_rollouts' cannot contain the spans"),
        ({"collection": "$x"}, "such as 'spans'"),
        ({"thread_safe": False}, "always thread-safe"),
        ({"mongo_uri": "mongodb://a", "uri": "mongodb://b"}, "is an alias of mongo_uri"),
        ({"partition_id": ""}, "non-empty"),
    ],
)
def test_an_argument_that_has_no_meaning_says_what_to_do(wrong: dict[str, Any], expected: str) -> None:
    with pytest.raises((BadRequestError, TypeError), match=expected):
        MongoLightningStore(**wrong)


_FORK = """
import asyncio, os, sys
from agentlightning.store.mongo import MongoLightningStore

store = MongoLightningStore(sys.argv[1], partition_id=sys.argv[2])
asyncio.run(store.enqueue_rollout("parent"))
child = os.fork()
if child == 0:
    claim = asyncio.run(store.dequeue_rollout())
    asyncio.run(store.close())
    os._exit(0 if claim is not None else 1)
_, status = os.waitpid(child, 0)
asyncio.run(store.enqueue_rollout("parent again"))
asyncio.run(store.close())
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_store_works_on_both_sides_of_a_fork(mongo_uri: str, partition: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _FORK, mongo_uri, partition]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
