"""Features of the store in a file alone: versions of the file, files of others."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from agentlightning.errors import BadRequestError, ConflictError
from agentlightning.store.sqlite import SQLiteLightningStore
from agentlightning.store.sqlite import schema as sqlite_schema
from agentlightning.types import RetentionPolicy, Span


def _span(rollout_id: str, attempt_id: str) -> Span:
    return Span.from_attributes(
        attributes={"k": 1}, rollout_id=rollout_id, attempt_id=attempt_id, sequence_id=-1, name="step"
    )


async def test_a_file_of_the_first_version_is_brought_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "old.db"
    await _make_first_version(path)
    store = SQLiteLightningStore(path)
    assert (await store.statistics())["total_spans"] == 2
    queued = await store.dequeue_rollout()
    assert queued is not None
    assert queued.input == "queued"
    page = await store.query_events(after="0")
    assert len(page.events) == 2
    ended = await store.query_rollouts(status_in=["succeeded"], sort_by="end_time")
    assert len(ended) == 1
    assert await store.delete_rollouts(keep_last=0) == 1
    await store.close()


async def _make_first_version(path: Path) -> None:
    """Write a file as version 1 did: a present one with the columns of that version."""
    store = SQLiteLightningStore(path)
    done = await store.start_rollout(input="done")
    await store.add_many_spans([_span(done.rollout_id, done.attempt.attempt_id) for _ in range(2)])
    await store.update_attempt(done.rollout_id, "latest", status="succeeded")
    await store.enqueue_rollout(input="queued")
    await store.close()
    db = sqlite3.connect(path, isolation_level=None)
    rows = db.execute(
        "SELECT number, rollout_id, run_id, status, start_time, available_at, deadline, worker_id, attempts,"
        " json_remove(CAST(body AS TEXT), '$.span_count', '$.span_bytes', '$.attempts_dropped',"
        " '$.rollout.priority', '$.rollout.not_before') FROM rollouts"
    ).fetchall()
    spans = db.execute("SELECT * FROM spans").fetchall()
    for table in ("rollouts", "spans", "rows", "counters", "run_records", "summaries", "inputs"):
        db.execute(f"DROP TABLE {table}")
    for statement in sqlite_schema._FIRST.split(";"):
        db.execute(statement)
    db.executemany("INSERT INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, CAST(? AS BLOB))", rows)
    db.executemany("INSERT INTO spans VALUES (?, ?, ?, ?, ?)", spans)
    db.execute("PRAGMA user_version = 1")
    db.close()


def test_a_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE invoices (total REAL)")
    db.commit()
    db.close()
    with pytest.raises(ConflictError, match="another program"):
        SQLiteLightningStore(path)
    tables = [row[0] for row in sqlite3.connect(path).execute("SELECT name FROM sqlite_master")]
    assert tables == ["invoices"]


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.write_bytes(b"no database" * 100)])
def test_what_is_no_store_file_is_refused_with_its_path(tmp_path: Path, make: object) -> None:
    path = tmp_path / "wrong.db"
    make(path)  # type: ignore[operator]
    with pytest.raises(BadRequestError, match=r"wrong\.db"):
        SQLiteLightningStore(path)


async def test_retention_keeps_what_ended_last(tmp_path: Path) -> None:
    policy = RetentionPolicy(keep_last=2)
    store = SQLiteLightningStore(tmp_path / "x.db", synchronous="NORMAL", lease_seconds=0.2, retention=policy)
    for index in range(6):
        made = await store.start_rollout(input=index)
        await store.update_attempt(made.rollout_id, "latest", status="succeeded")
    store._runtime.sweep_now()  # what the timer does every few seconds
    assert [rollout.input for rollout in await store.query_rollouts(sort_by="start_time")] == [4, 5]
    await store.close()
