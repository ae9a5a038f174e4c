"""Databases of older programs are upgraded, whole or not at all; those of newer programs are refused."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest

from agentlightning.errors import ConflictError
from agentlightning.store.base import LightningStore
from agentlightning.store.check import check_database, check_file
from agentlightning.store.engine.clock import SharedClock
from agentlightning.store.rules.durable import SCHEMA_VERSION
from agentlightning.store.spec import store_from_spec
from agentlightning.store.summaries.defaults import final_reward, query_summaries
from agentlightning.types import RunRecord
from tests.fixtures.stores import story
from tests.fixtures.stores.load import load
from tests.store.future_program import POINTS, VERSION
from tests.store.raw import mongo, sql

KINDS = ("sqlite", "postgres", "mongo")
OLDER = ("0.4.0", "schema_3", "schema_4")
pytestmark = [pytest.mark.parametrize("kind", KINDS), pytest.mark.heavy]


@pytest.fixture(autouse=True)
def clock_of_the_story(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing lapses and nothing is forgotten while the answers are compared."""
    monkeypatch.setattr("time.time", lambda: story.NOW + 10.0)
    monkeypatch.setattr(SharedClock, "set", mock.Mock())


@pytest.mark.parametrize("version", OLDER)
async def test_an_older_database_answers_what_its_own_program_answered(
    kind: str, version: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    spec, expected = load(version, kind, request, tmp_path)
    assert version_of(spec) < SCHEMA_VERSION
    store = store_from_spec(spec)
    assert version_of(spec) == SCHEMA_VERSION
    assert_same(await story.answers(store), expected)
    await assert_summaries(store)
    claimed = await store.dequeue_many_rollouts(limit=10)
    waiting = [r for r in expected["rollouts"] if r["status"] == "queuing" and not r["run_id"] and not r["not_before"]]
    assert [claim.rollout_id for claim in claimed] == [rollout["rollout_id"] for rollout in waiting]
    added = await store.enqueue_rollout("new")
    assert (await store.query_rollouts())[-1].rollout_id == added.rollout_id
    begin = (await store.query_events()).cursor  # it keeps runs, too
    await store.start_run("run-1", algorithm="GRPO")
    assert await store.add_run_records("run-1", [RunRecord(kind="step", step=9, data={"reward": 0.5})]) == 1
    assert (await store.query_run_records("run-1", step_from=9))[0].data == {"reward": 0.5}
    told_runs: list[tuple[str, int | None]] = []
    while ("run-1", 9) not in told_runs:  # of MongoDB, changes of before may be told again
        page = await store.query_events(after=begin, timeout=5.0)
        begin, told_runs = page.cursor, [(run.run_id, run.last_step) for run in page.runs]
    await store.close()


async def test_many_open_an_older_database_at_once(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    spec, expected = load("0.4.0", kind, request, tmp_path)
    with ThreadPoolExecutor(6) as threads:
        stores = list(threads.map(lambda _: store_from_spec(spec), range(6)))
    for store in stores:
        assert_same(await story.answers(store), expected)
        await store.close()
    assert version_of(spec) == SCHEMA_VERSION


async def test_a_kill_in_the_middle_of_an_upgrade_leaves_the_old_or_the_new(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    for point in POINTS:
        spec, expected = load("0.4.0", kind, request, tmp_path)
        killed = future(spec, point)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        if kind == "mongo":  # half of the documents are new: nobody but a program that finishes it may open it
            with pytest.raises(ConflictError, match=f"schema version {VERSION}"):
                store_from_spec(spec)
        else:
            assert version_of(spec) < SCHEMA_VERSION
            assert not future_parts(spec)
            store = store_from_spec(spec)
            assert_same(await story.answers(store), expected)
            await store.close()
        finished = future(spec)
        assert finished.returncode == 0, finished.stderr
        assert_same(json.loads(finished.stdout), expected)
        assert version_of(spec) == VERSION
        assert future_parts(spec)


async def test_a_newer_database_is_refused_by_both_versions(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    spec, _ = load("0.4.0", kind, request, tmp_path)
    await store_from_spec(spec).close()
    set_version(spec, 99)
    with pytest.raises(
        ConflictError, match=rf"schema version 99.*supports versions up to {SCHEMA_VERSION}. Nothing was changed"
    ):
        store_from_spec(spec)


async def test_a_program_that_runs_while_a_newer_one_upgrades_writes_nothing_more(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    spec, _ = load("0.4.0", kind, request, tmp_path)
    store = store_from_spec(spec)
    await store.enqueue_rollout("before")
    there = (await store.statistics()).get("total_rollouts")
    done = await asyncio.to_thread(future, spec)
    assert done.returncode == 0, done.stderr
    for write in (
        lambda: store.enqueue_rollout("after"),
        lambda: store.dequeue_rollout(),
        lambda: store.update_worker("w", {}),
        lambda: store.add_resources({}),
    ):
        with pytest.raises(ConflictError, match=rf"schema version {VERSION}.*supports versions up to {SCHEMA_VERSION}"):
            await write()
    assert (await store.statistics()).get("total_rollouts") == there
    assert not [worker for worker in await store.query_workers() if worker.worker_id == "w"]
    await store.close()


# --- the data as they lie there --------------------------------------------------------------------------------------


def future(spec: str, killed_at: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run the future program on a store."""
    arguments = [spec, *([] if killed_at is None else [str(killed_at)])]
    command = [sys.executable, "-m", "tests.store.future_program", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


async def assert_summaries(store: LightningStore) -> None:
    """Compare the stored summaries, and the rewards of attempts, with the rollouts and spans."""
    expected = await query_summaries(store, None, "start_time", "asc", limit=1000, offset=0, cursor=None)
    summaries = await store.query_rollout_summaries(sort_order="asc", limit=1000)
    assert {s.rollout_id: s for s in summaries} == {s.rollout_id: s for s in expected}
    assert summaries.total == len(expected) > 0
    for summary in summaries:
        for attempt in await store.query_attempts(summary.rollout_id):
            spans = list(await store.query_spans(summary.rollout_id, attempt.attempt_id))
            assert (attempt.reward, attempt.rewards) == final_reward(spans)


async def test_rewards_of_an_older_database_are_read_out_of_its_spans(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    spec, _ = load("schema_4", kind, request, tmp_path)
    store = store_from_spec(spec)
    attempts = [a for r in await store.query_rollouts() for a in await store.query_attempts(r.rollout_id)]
    rewarded = [(attempt.reward, attempt.rewards) for attempt in attempts if attempt.reward is not None]
    assert rewarded == [(0.75, {"primary": 0.75, "é": 0.375})], "the span with the greatest number, not the late one"
    await store.close()
    checked = check_file(spec.removeprefix("sqlite:///")) if kind == "sqlite" else check_database(spec)
    assert (checked.problems, checked.complete) == ([], True)


def assert_same(actual: Any, expected: Any) -> None:
    """Compare answers; a newer program may return more fields, never fewer."""
    if isinstance(expected, Mapping):
        expected = cast("Mapping[str, Any]", expected)
        if "events" in expected:  # a dump that was loaded into another server of PostgreSQL has lost their order
            for events in (actual["events"], expected["events"]):
                events.sort(key=itemgetter("rollout_id"))
        assert actual.keys() >= expected.keys()
        for name, value in expected.items():
            assert_same(actual[name], value)
    elif isinstance(expected, list):
        for one, other in zip(actual, cast("list[Any]", expected), strict=True):
            assert_same(one, other)
    else:
        assert actual == expected


def version_of(spec: str) -> int:
    """Return the version that is written in the data."""
    if spec.startswith("mongodb"):
        with mongo(spec) as (database, _):
            row = database["agl_counters"].find_one({"_id": "schema"})
        return row.get("from", row["version"])
    return sql(spec, "PRAGMA user_version" if spec.startswith("sqlite") else "SELECT version FROM {}schema")[0][0]


def set_version(spec: str, version: int) -> None:
    """Write another version."""
    if spec.startswith("mongodb"):
        with mongo(spec) as (database, _):
            database["agl_counters"].update_one({"_id": "schema"}, {"$set": {"version": version}})
    else:
        of_sqlite = f"PRAGMA user_version = {version}"
        sql(spec, of_sqlite if spec.startswith("sqlite") else f"UPDATE {{}}schema SET version = {version}")


def future_parts(spec: str) -> bool:
    """Return whether the changes of the future program are there: all of them (True) or none (False)."""
    if spec.startswith("mongodb"):
        with mongo(spec) as (database, _):
            rollouts = database["agl_rollouts"]
            columns = list(rollouts.find_one() or {})
            indexes = columns.count("words")  # the wire server of the tests does not tell its indexes
            empty = list(rollouts.find({"words": {"$exists": False}})) if "words" in columns else []
    else:
        names, index = {
            "sqlite": ("SELECT name FROM pragma_table_info('rollouts')", "name FROM sqlite_master WHERE name"),
            "postgres": (
                "SELECT column_name FROM information_schema.columns WHERE table_name = 'agl_rollouts'",
                "indexname FROM pg_indexes WHERE indexname",
            ),
        }["sqlite" if spec.startswith("sqlite") else "postgres"]
        columns = [row[0] for row in sql(spec, names)]
        indexes = len(sql(spec, f"SELECT {index} = 'future_words'"))
        empty = sql(spec, "SELECT 1 FROM {}rollouts WHERE words IS NULL") if "words" in columns else []
    assert ("words" in columns) == bool(indexes)
    assert not empty
    return bool(indexes)
