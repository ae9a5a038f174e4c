"""Store files that the page is shown with: a real demo run, many rollouts, many spans, hostile texts.

What takes long to make is made once, under `build/dashboard/`, and copied for each server.
"""

from __future__ import annotations

import asyncio
import fcntl
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from agentlightning.store.rules.durable import INDEXED, SCHEMA_VERSION, indexed, record_type
from agentlightning.store.sql import summaries
from agentlightning.store.sqlite import SQLiteLightningStore
from agentlightning.store.sqlite.tx import SQLiteLink
from tests.adapter.span_maker import span

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "dashboard"
MANY = 100_000
SPANS = 5000
HOSTILE = (
    '<script>window.hacked=1</script><img src=x onerror="window.hacked=2">\'"><svg onload=window.hacked=3>'
    "javascript:window.hacked=4 {{constructor.constructor('window.hacked=5')()}} \u202ereversed\u202c \x00 \ud800"
)
"""Runs, in one way or another, in a page that takes text for HTML; turns writing round; is no valid Unicode."""


T = TypeVar("T")


def run_async(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in a thread of its own: Playwright's loop runs in that of the test."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(work())).result()


@contextmanager
def _alone(name: str) -> Iterator[None]:
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def copy_store(source: Path, target: Path) -> Path:
    """Copy a SQLite file as one whole, its write-ahead log with it."""
    old, new = sqlite3.connect(source), sqlite3.connect(target)
    try:
        old.backup(new)
    finally:
        old.close()
        new.close()
    return target


def demo_store() -> Path:
    """Return the store of `agl demo --steps 3`; it runs if it has not yet."""
    with _alone("demo"):
        made, draft = BUILD / "demo", BUILD / "demo.draft"
        store = made / "store.db"
        if not store.exists():
            shutil.rmtree(draft, ignore_errors=True)  # of a run that was killed
            command = [sys.executable, "-m", "agentlightning.cli", "demo", "--steps", "3", "--plain"]
            done = subprocess.run([*command, "--out", str(draft)], cwd=ROOT, capture_output=True, text=True)
            has_store = (draft / "store.db").exists()
            assert has_store, f"agl demo left no store (exit code {done.returncode}):\n{done.stderr[-4000:]}"
            draft.rename(made)
        return store


def many_store() -> Path:
    """Return a store of `MANY` rollouts of one run in 250 steps: those of the demo, with ids and times of their own."""
    with _alone("many"):
        made = BUILD / f"many-{SCHEMA_VERSION}.db"
        if made.exists():
            return made
        draft = copy_store(demo_store(), BUILD / "many.draft")
        run_async(lambda: _opened(draft))
        db = sqlite3.connect(draft)
        try:
            _multiply(db)
        finally:
            db.close()
        draft.rename(made)
        return made


async def _opened(path: Path) -> None:
    """Bring a file up to date."""
    store = SQLiteLightningStore(path)
    await store.statistics()
    await store.close()


def _multiply(db: sqlite3.Connection) -> None:
    records = [record_type().validate_json(row[0]) for row in db.execute("SELECT body FROM rollouts ORDER BY number")]
    columns = ("rollout_id", "run_id", *INDEXED)
    insert = f"INSERT INTO rollouts ({', '.join(columns)}, change, body) VALUES ({', '.join('?' * (len(columns) + 2))})"
    [change] = db.execute("SELECT value FROM counters WHERE name = 'change'").fetchone()
    db.execute("BEGIN")
    for number in range(MANY - len(records)):
        old = records[number % len(records)]
        late = 0.05 * number
        rollout = old.rollout.model_copy(
            update={
                "rollout_id": f"ro-many-{number:06}",
                "start_time": old.rollout.start_time + late,
                "end_time": None if old.rollout.end_time is None else old.rollout.end_time + late,
                "metadata": {**(old.rollout.metadata or {}), "step": number // 400},
            }
        )
        attempts = [each.model_copy(update={"rollout_id": rollout.rollout_id}) for each in old.attempts]
        record = replace(old, rollout=rollout, attempts=attempts, span_count=0, span_bytes=0)
        values = (rollout.rollout_id, rollout.run_id, *indexed(record))
        db.execute(insert, (*values, change + number + 1, record_type().dump_json(record)))
        summaries.insert(SQLiteLink(db), record)
    db.execute("UPDATE counters SET value = ? WHERE name = 'change'", (change + MANY,))
    db.execute("COMMIT")


def spans_store(path: Path) -> tuple[Path, str]:
    """Make a store with one rollout of `SPANS` spans: turns of 99 below one agent, some failed, one pending.

    Returns the file and the rollout's id.
    """

    async def make() -> str:
        store = SQLiteLightningStore(path, synchronous="NORMAL")
        rollout = await store.start_rollout({"question": "many spans"})
        place = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        began = rollout.start_time
        made = [span("root", "agent", None, began, began + 60, 1)]
        for turn in range(1, SPANS):
            number, within = divmod(turn - 1, 100)
            parent = "root" if within == 0 else f"s{number * 100 + 1}"
            at = began + number + within / 100
            status = "ERROR" if turn % 500 == 0 else "OK"
            end = None if turn == SPANS - 1 else at + 0.009
            made.append(
                span(f"s{turn}", f"turn {number}" if within == 0 else "tool", parent, at, end, turn + 1, status)
            )
        await store.add_many_spans([each.model_copy(update=place) for each in made])
        await store.close()
        return rollout.rollout_id

    return path, run_async(make)
