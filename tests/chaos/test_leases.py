"""A worker that dies or freezes loses its claim within its lease, with no traffic on the store; what it does later
harms nobody. A store that was frozen or restarted takes nothing from workers that live."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from agentlightning.store import LightningStore, LightningStoreClient
from agentlightning.types import RolloutConfig
from tests.chaos.processes import CONTEXT, StoreProcess
from tests.chaos.stores import Place, open_store
from tests.chaos.stores import served as served_here
from tests.store.parts import required, span_of

pytestmark = pytest.mark.slow
LEASE = 1.0
TIMER = 0.25
"""Seconds between two scans of the timer, for this lease."""
SLACK = 1.0
"""Seconds that a loaded machine may take to let a thread run."""
HARD_LIMIT = 30.0
SETTINGS: dict[str, Any] = {"lease_seconds": LEASE, "scan_debounce_seconds": 1e9}
"""No call looks for lost workers but the first: the timer alone does."""


def work(spec: str, pipe: Connection) -> None:
    """A worker: claims, says so, sends heartbeats; told to finish, it adds a span and reports success."""

    async def live() -> None:
        settings = {} if spec.startswith("http") else SETTINGS
        store = open_store(spec, **settings)
        await store.update_worker("first")
        claim = required(await store.dequeue_rollout(worker_id="first", timeout=HARD_LIMIT))
        await store.add_span(span_of(claim, "early"))
        pipe.send((claim.rollout_id, claim.attempt.attempt_id))
        while not pipe.poll():
            await store.update_worker("first")
            await asyncio.sleep(0.1)
        late = await store.add_span(span_of(claim, "late"))
        ended = await store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status="succeeded")
        pipe.send((late is not None, ended.status))
        await store.close()

    asyncio.run(live())


@contextlib.asynccontextmanager
async def worker(spec: str) -> AsyncIterator[tuple[Any, Connection]]:
    """A worker in a process of its own, with a pending claim."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=work, args=(spec, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        await asyncio.to_thread(ours.recv)
        yield process, ours
    finally:
        process.kill()
        await asyncio.to_thread(process.join)
        process.close()
        ours.close()


async def test_a_killed_workers_attempt_ends_within_its_lease_and_with_no_traffic(place: Place) -> None:
    async with place.opened(**SETTINGS) as store:
        rollout = await store.enqueue_rollout("x", config=RolloutConfig(infrastructure_retries=0))
        async with place.everywhere(store) as spec, worker(spec) as (process, _):
            waiting = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=HARD_LIMIT))
            await asyncio.sleep(LEASE)  # it lives longer than its lease
            assert not waiting.done()
            process.kill()
            [ended] = await waiting
        assert ended.status == "failed"
        [attempt] = await store.query_attempts(rollout.rollout_id)
        assert (attempt.status, attempt.outcome, attempt.outcome_reason) == (
            *("unresponsive", "infrastructure_fault", "lease_expired"),
        )
        stored_worker = required(await store.get_worker_by_id("first"))
        assert stored_worker.last_heartbeat_time is not None
        assert attempt.end_time is not None
        assert LEASE <= attempt.end_time - stored_worker.last_heartbeat_time <= LEASE + TIMER + SLACK


async def test_a_frozen_worker_that_comes_back_late_changes_nothing_of_the_newer_attempt(place: Place) -> None:
    async with place.opened(**SETTINGS) as store:
        rollout = await store.enqueue_rollout("x")
        async with served_here(store) as endpoint, worker(endpoint) as (process, pipe):
            os.kill(process.pid, signal.SIGSTOP)
            newer = required(await store.dequeue_rollout(worker_id="second", timeout=HARD_LIMIT))
            assert (newer.rollout_id, newer.attempt.sequence_id) == (rollout.rollout_id, 2)
            pipe.send("finish")
            os.kill(process.pid, signal.SIGCONT)
            assert await asyncio.to_thread(pipe.recv) == (True, "succeeded")
        assert await store.get_rollout_by_id(rollout.rollout_id) == newer
        spans = await store.query_spans(rollout.rollout_id)
        assert [(s.name, s.attributes.get("agentlightning.stale")) for s in spans] == [("early", None), ("late", True)]
        await store.update_attempt(newer.rollout_id, newer.attempt.attempt_id, status="failed")
        assert await _statuses(store, rollout.rollout_id) == ("failed", ["succeeded", "failed"])


async def _statuses(store: LightningStore, rollout_id: str) -> tuple[str, list[str]]:
    rollout = required(await store.get_rollout_by_id(rollout_id))
    return rollout.status, [attempt.status for attempt in await store.query_attempts(rollout_id)]


async def test_a_time_limit_runs_on_after_a_restart_with_no_traffic(durable: Place) -> None:
    async with durable.opened(**SETTINGS) as store:
        rollout = await store.start_rollout("x", config=RolloutConfig(timeout_seconds=1.0))
    async with durable.opened(**SETTINGS) as again:
        [ended] = await again.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=HARD_LIMIT)
        assert ended.status == "failed"
        [attempt] = await again.query_attempts(rollout.rollout_id)
        assert attempt.status == "timeout"
        assert attempt.end_time is not None
        assert 1.0 <= attempt.end_time - attempt.start_time <= 1.0 + LEASE + TIMER + SLACK


async def test_a_worker_lost_while_the_store_was_down_is_noticed_after_the_restart(durable: Place) -> None:
    async with durable.opened(**SETTINGS) as store:
        rollout = await store.enqueue_rollout("x", config=RolloutConfig(infrastructure_retries=0))
        await store.update_worker("first")
        assert await store.dequeue_rollout(worker_id="first") is not None
    async with durable.opened(**SETTINGS) as again:
        [ended] = await again.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=HARD_LIMIT)
        assert await _statuses(again, ended.rollout_id) == ("failed", ["unresponsive"])


async def test_a_heartbeat_that_waits_to_be_written_keeps_the_claim(tmp_path: Path) -> None:
    """The timer looks while another process holds the file; the heartbeat waits before the timer's verdict."""
    async with Place("sqlite", f"sqlite:///{tmp_path}/store.db").opened(**SETTINGS) as store:
        await asyncio.sleep(LEASE)  # it is past the first lease, in which it takes nothing anyway
        await store.update_worker("first")
        rollout = await store.start_rollout("x", worker_id="first")
        other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        await asyncio.sleep(LEASE - 0.2)
        other.execute("BEGIN IMMEDIATE")
        heartbeat = asyncio.create_task(store.update_worker("first"))
        await asyncio.sleep(0.2 + 2 * TIMER)
        assert not heartbeat.done()
        other.execute("COMMIT")
        other.close()
        await heartbeat
        await asyncio.sleep(TIMER)  # the verdict, if there was one, is written
        assert await _statuses(store, rollout.rollout_id) == ("preparing", ["preparing"])


@contextlib.asynccontextmanager
async def served(place: Place, **settings: Any) -> AsyncIterator[tuple[int, LightningStoreClient]]:
    """A store server in a process of its own: its pid, and a client of it."""
    server = StoreProcess(place.spec, **{**SETTINGS, **settings})
    await asyncio.to_thread(server.start)
    client = LightningStoreClient(server.endpoint)
    try:
        yield server.pid, client
    finally:
        await client.close()
        await asyncio.to_thread(server.kill)


async def test_a_store_that_was_frozen_takes_nothing_from_workers_that_live(place: Place) -> None:
    lease = 3.0  # on a loaded machine a worker that lives may be silent for a second
    async with served(place, lease_seconds=lease) as (server, client):
        rollout = await client.enqueue_rollout("x")
        async with worker(client.server_address_root) as (_, pipe):
            await asyncio.sleep(lease + TIMER)  # the store is past the first lease, in which it takes nothing anyway
            for _ in range(3):
                os.kill(server, signal.SIGSTOP)
                await asyncio.sleep(lease + 0.2)
                os.kill(server, signal.SIGCONT)
                await asyncio.sleep(lease)
            assert await _statuses(client, rollout.rollout_id) == ("running", ["running"])
            pipe.send("finish")
            assert await asyncio.to_thread(pipe.recv) == (True, "succeeded")
        assert await _statuses(client, rollout.rollout_id) == ("succeeded", ["succeeded"])


@pytest.mark.parametrize("late", ["span", "metadata"])
async def test_rollouts_that_ended_do_not_hide_those_that_lapse_from_the_timer(place: Place, late: str) -> None:
    """Agents report late to rollouts that were cancelled or have ended; there may be very many of them."""
    config = RolloutConfig(unresponsive_seconds=0.2)
    async with place.opened(**SETTINGS, synchronous="NORMAL") as store:
        for _ in range(300):
            ended = await store.start_rollout("x", config=config)
            await store.update_rollout(ended.rollout_id, status="cancelled")
            if late == "span":
                await store.add_span(span_of(ended, "late"))
            else:
                await store.update_attempt(ended.rollout_id, "latest", metadata={"late": True})
        rollout = await store.start_rollout("x", config=config)
        [lapsed] = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=5.0)
        assert await _statuses(store, lapsed.rollout_id) == ("failed", ["unresponsive"])


async def test_a_rollout_that_was_set_running_by_hand_does_not_stop_the_timer(place: Place) -> None:
    async with place.opened(**SETTINGS) as store:
        odd = await store.start_rollout("x", config=RolloutConfig(max_attempts=2, retry_condition=["failed"]))
        await store.update_attempt(odd.rollout_id, "latest", status="failed")
        await store.update_rollout(odd.rollout_id, status="running")
        await store.update_rollout(odd.rollout_id, config=RolloutConfig(timeout_seconds=0.01))
        rollout = await store.start_rollout("x", config=RolloutConfig(timeout_seconds=0.2))
        [lapsed] = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=5.0)
        assert await _statuses(store, lapsed.rollout_id) == ("failed", ["timeout"])
