"""A record that cannot be read is a fault of the store, reported once; everything else continues without it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from agentlightning.cli.main import main
from agentlightning.errors import DamagedRecordError
from agentlightning.store.base import LightningStore
from agentlightning.types import PromptTemplate
from tests.chaos.stores import fresh_place
from tests.store.conftest import Serve
from tests.store.parts import required, span_of, with_token
from tests.store.raw import mongo, sql

BODIES = {
    "no JSON": lambda body: "{" + body[2:],
    "nothing": lambda body: "",
    "another shape": lambda body: "[1, 2]",
    "a field missing": lambda body: body.replace('"start_time":', '"was":', 1),
    "a status that nobody knows": lambda body: body.replace('"status":"queuing"', '"status":"lost"', 1),
}


class Data:
    """The rows of a store as they are stored."""

    def __init__(self, spec: str) -> None:
        self.spec = spec

    def damage(self, table: str, how: Callable[[str], str], **where: str) -> None:
        """Change the body of the rows with these values."""
        if self.spec.startswith("mongodb"):
            with mongo(self.spec) as (database, partition):
                documents = list(database[f"agl_{table}"].find({"partition": partition, **where}))
                for document in documents:
                    change = {"$set": {"body": how(document["body"])}}
                    database[f"agl_{table}"].update_one({"_id": document["_id"]}, change)
        else:
            tests = " AND ".join(f"{name} = '{value}'" for name, value in where.items())
            documents = sql(self.spec, f"SELECT number, body FROM {{}}{table} WHERE {tests}")
            for number, body in documents:
                damaged = how(bytes(body).decode()).encode()
                sql(self.spec, f"UPDATE {{}}{table} SET body = ? WHERE number = ? AND {tests}", damaged, number)
        assert documents


@pytest.fixture(params=("sqlite", "postgres", "mongo"))
async def damageable(
    request: pytest.FixtureRequest, tmp_path: Path, stack: AsyncExitStack
) -> tuple[LightningStore, Data]:
    place = fresh_place(request.param, request, tmp_path)
    return await stack.enter_async_context(place.opened(scan_debounce_seconds=0.0)), Data(place.spec)


@pytest.mark.parametrize("kind", BODIES)
async def test_a_damaged_rollout_at_the_head_of_the_queue_holds_nobody_up(
    kind: str, damageable: tuple[LightningStore, Data], caplog: pytest.LogCaptureFixture
) -> None:
    store, data = damageable
    bad, *good = [(await store.enqueue_rollout(n)).rollout_id for n in range(4)]
    data.damage("rollouts", BODIES[kind], rollout_id=bad)
    pages = [await store.query_rollouts(**page) for page in ({}, {"limit": 1}, {"limit": 2, "sort_by": "start_time"})]
    assert [[r.rollout_id for r in page] for page in pages] == [good, good[:1], good[:2]]
    assert [page.total for page in pages] == [3, 3, 3]
    assert [r.rollout_id for r in await store.query_rollouts(sort_by="status")] == good
    assert [event.rollout_id for event in (await store.query_events(after="0")).events] == good
    claimed = await store.dequeue_many_rollouts(limit=10, worker_id="w")
    assert [claim.rollout_id for claim in claimed] == good
    for call in (
        lambda: store.get_rollout_by_id(bad),
        lambda: store.update_rollout(bad, status="cancelled"),
        lambda: store.start_attempt(bad),
        lambda: store.query_attempts(bad),
        lambda: store.delete_rollouts(rollout_ids=[bad]),
    ):
        with pytest.raises(DamagedRecordError, match=f"rollout '{bad}' cannot be read"):
            await call()
    log_records = [record for record in caplog.records if bad in record.getMessage()]
    assert [record.levelno for record in log_records] == [logging.ERROR]
    assert await store.delete_rollouts(rollout_ids=[bad], force=True) == 1
    assert await store.get_rollout_by_id(bad) is None


async def test_a_claim_that_meets_a_damaged_rollout_first_goes_on_to_the_next(
    damageable: tuple[LightningStore, Data],
) -> None:
    store, data = damageable
    ids = [(await store.enqueue_rollout(n)).rollout_id for n in range(5)]
    for damaged in ids[:2]:
        data.damage("rollouts", lambda body: body[:50], rollout_id=damaged)
    assert required(await store.dequeue_rollout(worker_id="w")).rollout_id == ids[2]
    assert [claim.rollout_id for claim in await store.dequeue_many_rollouts(limit=9)] == ids[3:]
    assert [r.rollout_id for r in await store.query_rollouts()] == ids[2:]


async def test_a_damaged_span_is_named_and_the_other_rollouts_are_read(damageable: tuple[LightningStore, Data]) -> None:
    store, data = damageable
    one, two = [await store.start_rollout(n) for n in range(2)]
    for made in (one, two):
        spans = [span_of(made, span_id=f"{n:016x}") for n in (1, 2)]
        await store.add_many_spans(spans)
    data.damage("spans", lambda body: body.replace('"name"', '"gone"'), rollout_id=one.rollout_id, span_id=f"{2:016x}")
    for query in ({}, {"name": "step"}, {"sort_by": "name"}):
        with pytest.raises(DamagedRecordError, match=f"span '{2:016x} of rollout {one.rollout_id}' cannot be read"):
            await store.query_spans(one.rollout_id, **query)
    assert len(await store.query_spans(one.rollout_id, span_id=f"{1:016x}")) == 1
    assert len(await store.query_spans(two.rollout_id)) == 2
    await store.update_attempt(one.rollout_id, "latest", status="succeeded")


async def test_damaged_workers_resources_and_claims_do_not_stop_the_others(
    damageable: tuple[LightningStore, Data],
) -> None:
    store, data = damageable
    for worker in ("bad", "good"):
        await store.update_worker(worker, {"n": 1})
    for name in ("rs-bad", "rs-good"):
        await store.update_resources(name, {"p": PromptTemplate(template="x", engine="f-string")}, run_id=name)
    await store.enqueue_many_rollouts([{"input": n} for n in range(3)])  # type: ignore[list-item]
    required(await with_token("a token", store.dequeue_rollout()))
    data.damage("rows", lambda body: body[:20], kind="worker", key="bad")
    data.damage("rows", lambda body: "{}", kind="resources", key="rs-bad")
    data.damage("rows", lambda body: "[]", kind="claim", key="a token")
    assert [worker.worker_id for worker in await store.query_workers()] == ["good"]
    assert [update.resources_id for update in await store.query_resources()] == ["rs-good"]
    assert (await store.statistics()).get("total_rollouts") == 3
    with pytest.raises(DamagedRecordError, match="resources 'rs-bad' cannot be read"):
        await store.get_resources_by_id("rs-bad")
    with pytest.raises(DamagedRecordError, match="resources 'rs-bad' cannot be read"):
        await store.update_resources("rs-bad", {})
    with pytest.raises(DamagedRecordError, match="claim 'a token' cannot be read"):
        await with_token("a token", store.dequeue_rollout())
    assert await store.dequeue_rollout(worker_id="good") is not None
    assert (await store.update_worker("bad", {"n": 2})).heartbeat_stats == {"n": 2}
    assert (await store.update_worker("bad", {"n": 3})).heartbeat_stats == {"n": 3}
    assert {worker.worker_id for worker in await store.query_workers()} == {"bad", "good"}


async def test_a_server_says_so_with_its_own_error_and_status(
    damageable: tuple[LightningStore, Data], serve: Serve
) -> None:
    store, data = damageable
    made = await store.enqueue_rollout("x")
    data.damage("rollouts", lambda body: "{}", rollout_id=made.rollout_id)
    _, client = await serve(store)
    assert await client.dequeue_rollout() is None
    assert list(await client.query_rollouts()) == []
    with pytest.raises(DamagedRecordError, match=made.rollout_id):
        await client.get_rollout_by_id(made.rollout_id)


async def test_the_check_lists_every_damaged_record_and_how_to_remove_it(
    damageable: tuple[LightningStore, Data], capsys: pytest.CaptureFixture[str]
) -> None:
    store, data = damageable
    made = await store.start_rollout("x")
    await store.add_many_spans([span_of(made, span_id=f"{1:016x}"), span_of(made, span_id=f"{2:016x}")])
    queued = await store.enqueue_rollout("y")
    await store.update_worker("w", {})
    assert main(["store", "check", "--db", data.spec]) == 0
    assert "schema version" in capsys.readouterr().out
    data.damage("rollouts", lambda body: "{}", rollout_id=queued.rollout_id)
    data.damage("spans", lambda body: "{}", span_id=f"{2:016x}")
    data.damage("rows", lambda body: "{}", kind="worker")
    assert main(["store", "check", "--db", data.spec]) == 1
    lines = capsys.readouterr().out.splitlines()
    for name, removal in (
        (f"rollout {queued.rollout_id}", "delete_rollouts"),
        (f"span {2:016x}", "elete"),
        ("row 'w' of kind 'worker'", "elete"),
    ):
        [line] = [line for line in lines if name in line and "cannot be read" in line]
        assert removal in line.replace("DELETE", "delete")
    assert await store.dequeue_rollout() is None
    assert main(["store", "check", "--db", data.spec]) == 1  # what was set aside is listed as well
    assert queued.rollout_id in capsys.readouterr().out


@pytest.mark.parametrize("damageable", ["sqlite", "postgres"], indirect=True)
async def test_the_check_compares_the_tables_with_the_records(
    damageable: tuple[LightningStore, Data], capsys: pytest.CaptureFixture[str]
) -> None:
    store, data = damageable
    made = await store.start_rollout("x")
    await store.add_many_spans([span_of(made, span_id=f"{1:016x}")])
    here = f"WHERE rollout_id = '{made.rollout_id}'"
    for change, problem in (
        (f"UPDATE {{}}rollouts SET attempts = 7 {here}", "column attempts is 7, but the record has 1"),
        (f"UPDATE {{}}summaries SET status = 'failed' {here}", "column status of the summary is 'failed', but"),
        (f"DELETE FROM {{}}spans {here}", "it has 0 spans of 0 bytes, but the record has 1 of"),
        (f"DELETE FROM {{}}summaries {here}", "it has no summary"),
    ):
        sql(data.spec, change)
        assert main(["store", "check", "--db", data.spec]) == 1
        assert f"rollout {made.rollout_id}: {problem}" in capsys.readouterr().out
