"""A store's file can be copied while a store writes to it, and a check finds the damage in one."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import BadRequestError, ConflictError, StoreWriteError
from agentlightning.store.check import check_file
from agentlightning.store.rules.durable import LISTED, SCHEMA_VERSION
from agentlightning.store.sqlite import SQLiteLightningStore
from agentlightning.store.sqlite import file as sqlite_file
from agentlightning.store.sqlite.file import backup_file
from agentlightning.types import EnqueueRolloutRequest, PromptTemplate, RolloutConfig, Span


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SQLiteLightningStore]:
    """A store with rollouts queued, delayed, running, to be retried and ended, with spans and resources."""
    store = SQLiteLightningStore(tmp_path / "run.db", synchronous="NORMAL")
    await store.add_resources({"p": PromptTemplate(template="{x}", engine="f-string")})
    await store.update_resources("prompts", {"p": PromptTemplate(template="{y}", engine="f-string")}, run_id="a")
    await store.update_resources("prompts", {"p": PromptTemplate(template="{z}", engine="f-string")}, run_id="a")
    limits = RolloutConfig(timeout_seconds=3600, max_attempts=2, retry_condition=["failed"])
    requests = [EnqueueRolloutRequest(input={"n": n}, config=limits, run_id="a" if n % 2 else None) for n in range(8)]
    await store.enqueue_many_rollouts(requests)
    await store.enqueue_rollout({"n": 8}, priority=3, not_before=9e9)
    await store.update_worker("w", {"cpu": 1.0})
    for status in ("succeeded", "failed", None):
        claimed = await store.dequeue_rollout(worker_id="w")
        assert claimed is not None
        await store.add_many_spans([span_of(claimed, f"step {n}") for n in range(3)])
        if status is not None:
            await store.update_attempt(claimed.rollout_id, "latest", status=status)
    cancelled = await store.dequeue_rollout(worker_id="w", run_id="a")
    assert cancelled is not None
    await store.update_rollout(cancelled.rollout_id, status="cancelled")
    yield store
    await store.close()


def span_of(claimed: Any, name: str) -> Span:
    return Span.from_attributes(
        attributes={"k": "v"}, rollout_id=claimed.rollout_id, attempt_id=claimed.attempt.attempt_id, sequence_id=-1,
        name=name,
    )  # fmt: skip


def change(path: str, *statements: str) -> None:
    """Damage a file in a way in which no store does."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for statement in statements:
            db.execute(statement)


def damage(path: Path) -> None:
    """Overwrite some pages."""
    with open(path, "r+b") as file:
        file.seek(4096 * 3)
        file.write(b"\xa5" * 4096 * 4)


# --- check -----------------------------------------------------------------------------------------------------------


async def test_a_store_in_the_midst_of_life_is_whole(store: SQLiteLightningStore) -> None:
    report = check_file(store.path)
    assert report.problems == []
    assert (report.rollouts, report.spans, report.schema_version) == (9, 9, SCHEMA_VERSION)
    assert report.complete


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        (
            "UPDATE rollouts SET status = 'queuing' WHERE status = 'succeeded'",
            "column status is 'queuing', but the record",
        ),
        ("UPDATE rollouts SET available_at = NULL WHERE status = 'requeuing'", "column available_at is None, but"),
        ("UPDATE rollouts SET attempts = 7 WHERE status = 'cancelled'", "column attempts is 7, but the record has 1"),
        ("UPDATE rollouts SET span_bytes = 1 WHERE status = 'succeeded'", "column span_bytes is 1, but the record has"),
        (
            "UPDATE rollouts SET worker_id = 'x' WHERE status = 'succeeded'",
            "column worker_id is 'x', but the record has",
        ),
        ("UPDATE rollouts SET body = '{}' WHERE status = 'succeeded'", "the record cannot be read"),
        ("DELETE FROM spans WHERE number = 1", "it has 2 spans of"),
        ("UPDATE spans SET attempt_id = 'at-other' WHERE number = 1", "belongs to attempt at-other, which the rollout"),
        ("UPDATE spans SET body = 'x' WHERE number = 1", "cannot be read: Invalid JSON"),
        ("UPDATE spans SET span_id = 'other' WHERE number = 1", "span other is stored under different ids"),
        ("DELETE FROM rollouts WHERE status = 'succeeded'", "3 spans of rollout ro-"),
        ("UPDATE counters SET value = 1", "the newest change has number"),
        ("UPDATE rollouts SET change = 1", "rollouts or runs with the same change number as another: 8"),
        ("UPDATE rows SET body = 'x' WHERE kind = 'worker'", "the row 'w' of kind 'worker' cannot be read"),
        ("UPDATE rows SET kind = 'thing' WHERE kind = 'worker'", "the row 'w' of kind 'thing' cannot be read"),
        (
            "DELETE FROM rows WHERE kind = 'resources' AND key = 'prompts'",
            "the latest resources are prompts, which do",
        ),
        ("DELETE FROM rows WHERE kind = 'resources_version'", "resources prompts: version 2 is missing"),
    ],
)
async def test_what_the_tables_and_the_records_say_must_agree(
    store: SQLiteLightningStore, statement: str, problem: str
) -> None:
    change(store.path, statement)
    assert any(problem in line for line in check_file(store.path).problems), check_file(store.path).problems


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"queued_at":null', '"queued_at":1.0', "the status is succeeded, but it is in the queue"),
        ('"deadline":null', '"deadline":1.0', "the status is succeeded, but it has a deadline"),
        ('"status":"succeeded"', '"status":"running"', "the status is running, but it has an end_time"),
        ('"sequence_id":1', '"sequence_id":2', "the attempts are not numbered 1, 2, 3"),
        ('"spans_issued":3', '"spans_issued":2', "a span has number 3, but only 2 numbers were assigned"),
        ('"rollout_id":"ro-', '"rollout_id":"xx-', "column rollout_id is 'ro-"),
    ],
)
async def test_what_a_record_says_must_be_possible(
    store: SQLiteLightningStore, old: str, new: str, problem: str
) -> None:
    change(
        store.path,
        f"UPDATE rollouts SET body = CAST(replace(CAST(body AS TEXT), '{old}', '{new}') AS BLOB)"
        " WHERE status = 'succeeded'",
    )
    assert any(problem in line for line in check_file(store.path).problems), check_file(store.path).problems


async def test_damage_to_the_structure_is_found_and_does_not_end_in_a_traceback(
    store: SQLiteLightningStore, tmp_path: Path
) -> None:
    backup_file(store.path, tmp_path / "copy.db")
    damage(tmp_path / "copy.db")
    report = check_file(tmp_path / "copy.db")
    assert report.found > 0
    assert any("SQLite" in line or "the check stopped because" in line for line in report.problems)


async def test_of_many_problems_the_first_are_listed_and_all_are_counted(store: SQLiteLightningStore) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(LISTED + 20)])
    change(store.path, "UPDATE rollouts SET attempts = 99")
    report = check_file(store.path)
    assert (len(report.problems), report.found) == (LISTED, LISTED + 29)


async def test_a_check_beside_a_writer_sees_one_moment(store: SQLiteLightningStore) -> None:
    stop = asyncio.Event()

    async def write() -> None:
        while not stop.is_set():
            started = await store.start_rollout("x")
            await store.add_span(span_of(started, "step"))
            await store.update_attempt(started.rollout_id, "latest", status="succeeded")

    writers = [asyncio.create_task(write()) for _ in range(4)]
    for _ in range(5):
        assert (await asyncio.to_thread(check_file, store.path)).problems == []
    stop.set()
    await asyncio.gather(*writers)


def test_a_file_that_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match=r"There is no store file .*nothing\.db"):
        check_file(tmp_path / "nothing.db")
    (tmp_path / "text.db").write_text(
        "no database, but a text that is long enough to be read as the header of one, or so"
    )
    with pytest.raises(BadRequestError, match="not a database"):
        check_file(tmp_path / "text.db")
    change(str(tmp_path / "other.db"), "CREATE TABLE songs (title TEXT)")
    with pytest.raises(ConflictError, match="of another program"):
        check_file(tmp_path / "other.db")
    assert not (tmp_path / "nothing.db").exists()


async def test_a_newer_file_is_refused_and_of_an_older_one_only_the_structure_is_checked(
    store: SQLiteLightningStore,
) -> None:
    await store.close()
    change(store.path, "PRAGMA user_version = 99")
    with pytest.raises(ConflictError, match="schema version 99"):
        check_file(store.path)
    change(store.path, "PRAGMA user_version = 1", "UPDATE rollouts SET attempts = 99")
    report = check_file(store.path)
    assert (report.complete, report.problems, report.rollouts) == (False, [], 9)


# --- backup ----------------------------------------------------------------------------------------------------------


async def test_a_copy_taken_under_writers_is_one_moment_and_has_all_that_was_acknowledged(
    store: SQLiteLightningStore, tmp_path: Path
) -> None:
    acknowledged: list[str] = []
    stop, enough = asyncio.Event(), asyncio.Event()

    async def write() -> None:
        while not stop.is_set():
            acknowledged.append((await store.enqueue_rollout({"text": "x" * 2000})).rollout_id)
            if len(acknowledged) >= 200:
                enough.set()

    writers = [asyncio.create_task(write()) for _ in range(4)]
    await enough.wait()
    for number in range(3):
        before = list(acknowledged)
        copy = tmp_path / f"copy{number}.db"
        assert await asyncio.to_thread(backup_file, store.path, copy) > 200 * 2000
        assert check_file(copy).problems == []
        with closing(sqlite3.connect(copy)) as db:
            ids = {row[0] for row in db.execute("SELECT rollout_id FROM rollouts")}
        assert set(before) <= ids
    stop.set()
    await asyncio.gather(*writers)


async def test_a_copy_is_a_store_like_any_other(store: SQLiteLightningStore, tmp_path: Path) -> None:
    backup_file(store.path, tmp_path / "copy.db")
    assert set(os.listdir(tmp_path)) == {"run.db", "run.db-wal", "run.db-shm", "copy.db"}
    copy = SQLiteLightningStore(tmp_path / "copy.db")
    assert await copy.query_rollouts() == await store.query_rollouts()
    claimed = await copy.dequeue_rollout()
    assert claimed is not None
    await copy.close()
    assert (await store.get_rollout_by_id(claimed.rollout_id)) != claimed, "the original does not change with it"


async def test_a_copy_does_not_replace_a_file_unless_told_to(store: SQLiteLightningStore, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    copy.write_text("mine")
    with pytest.raises(ConflictError, match=r"exists already; choose another file, or replace it with --force"):
        backup_file(store.path, copy)
    assert copy.read_text() == "mine"
    backup_file(store.path, copy, force=True)
    assert check_file(copy).problems == []


@pytest.mark.parametrize("force", [False, True])
async def test_a_copy_never_replaces_a_store_in_use(store: SQLiteLightningStore, tmp_path: Path, force: bool) -> None:
    other = SQLiteLightningStore(tmp_path / "other.db")
    await other.enqueue_rollout("x")
    with pytest.raises(ConflictError):
        backup_file(store.path, tmp_path / "other.db", force=force)
    with pytest.raises(ConflictError, match="is the store itself"):
        backup_file(store.path, Path(store.path), force=force)
    assert len(await other.query_rollouts()) == 1
    await other.close()


async def test_the_log_of_a_store_that_was_killed_is_not_applied_to_a_copy(
    store: SQLiteLightningStore, tmp_path: Path
) -> None:
    (tmp_path / "gone.db-wal").write_bytes(b"changes of a store whose file is gone")
    with pytest.raises(ConflictError, match=r"gone\.db-wal.*not closed"):
        backup_file(store.path, tmp_path / "gone.db")


def fail(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("part", ["_sync", "_copy"])
async def test_a_copy_that_fails_leaves_nothing_behind(
    store: SQLiteLightningStore, tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, part, fail)
    before = set(os.listdir(tmp_path))
    with pytest.raises(StoreWriteError, match="No space left on device"):
        backup_file(store.path, tmp_path / "copy.db")
    assert set(os.listdir(tmp_path)) == before


async def test_a_damaged_store_makes_no_copy(store: SQLiteLightningStore, tmp_path: Path) -> None:
    backup_file(store.path, tmp_path / "damaged.db")
    damage(tmp_path / "damaged.db")
    with pytest.raises(StoreWriteError, match=r"damaged|malformed"):
        backup_file(tmp_path / "damaged.db", tmp_path / "copy.db")
    assert not [name for name in os.listdir(tmp_path) if name.startswith(("copy", ".copy"))]


async def test_a_folder_that_is_not_there_is_named(store: SQLiteLightningStore, tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match=r"The folder .* does not exist"):
        backup_file(store.path, tmp_path / "no" / "copy.db")


async def test_where_a_file_system_has_no_hard_links_a_copy_still_gets_its_name(
    store: SQLiteLightningStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", fail)
    backup_file(store.path, tmp_path / "copy.db")
    assert check_file(tmp_path / "copy.db").problems == []
