"""A run is told to end through its store; who is not of the run hears nothing."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from agentlightning.execution import (
    ClientServerExecutionStrategy,
    ExecutionEvent,
    SharedMemoryExecutionStrategy,
    stop_run,
)
from agentlightning.execution.events import ThreadingEvent
from agentlightning.execution.run.remote import heed
from agentlightning.execution.run.stop_note import (
    CONTROL_PREFIX,
    HAS_ENDED,
    RemoteRunners,
    StopNote,
    remote_runners,
    stop_note,
    until_told,
)
from agentlightning.store import InMemoryLightningStore, LightningStore
from tests.execution.bundles import patient_algorithm

STRATEGIES: dict[str, Any] = {
    "shm, runner on the main thread": lambda: SharedMemoryExecutionStrategy(graceful_delay=0.2),
    "shm, algorithm on the main thread": lambda: SharedMemoryExecutionStrategy(n_runners=2, graceful_delay=0.2),
    "cs": lambda: ClientServerExecutionStrategy(server_port=0, graceful_timeout=0.2),
}


async def stops_its_run(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
    """A runner that tells the run to end until it does: what is said before the algorithm starts does not count."""
    while not event.is_set():
        await stop_run(store, None, reason="enough")
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_a_run_that_is_told_to_end_ends_without_a_result_and_without_an_error(strategy: Any) -> None:
    assert strategy().execute(patient_algorithm, stops_its_run, InMemoryLightningStore()) is None


def test_a_note_from_before_does_not_end_the_next_run() -> None:
    async def algorithm(store: LightningStore, event: ExecutionEvent) -> str:
        await asyncio.sleep(1.5)  # longer than it takes to look
        return "ran"

    async def runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None: ...

    store = InMemoryLightningStore()
    asyncio.run(stop_run(store, None))
    assert SharedMemoryExecutionStrategy().execute(algorithm, runner, store) == "ran"


async def test_notes_of_runs_are_kept_apart_and_are_taken_back_by_a_start() -> None:
    store = InMemoryLightningStore()
    first = await stop_run(store, "a", reason="over")
    assert await stop_note(store, "a") == first == StopNote("over", first.stamp)
    assert await stop_note(store, None) is None
    assert (await stop_run(store, "a", reason="over")).stamp > first.stamp
    await store.start_run("a")
    assert await stop_note(store, "a") is None
    assert (await store.query_workers(worker_id_contains=CONTROL_PREFIX)).total == 0


async def test_the_end_of_a_run_is_a_note_too() -> None:
    store = InMemoryLightningStore()
    await store.start_run("a")
    ended = await store.update_run("a", state="succeeded")
    assert await stop_note(store, "a") == StopNote(HAS_ENDED, ended.end_time or 0.0)


async def test_an_algorithm_goes_on_when_another_start_of_its_run_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.execution.run.remote.LOOK_SECONDS", 0.01)
    store, event, is_open = InMemoryLightningStore(), ThreadingEvent(), ThreadingEvent()
    is_open.set()
    await store.start_run("a")
    await store.update_run("a", state="succeeded")
    heeding = asyncio.create_task(heed(store, "a", event, is_open))
    await asyncio.sleep(0.1)
    assert not event.is_set()
    await stop_run(store, "a")
    await asyncio.wait_for(heeding, 10)
    assert event.is_set()


async def test_a_note_that_an_older_release_left_among_the_workers_says_nothing() -> None:
    store = InMemoryLightningStore()
    await store.update_worker(f"{CONTROL_PREFIX}run:a", {"stop": "long ago"})
    assert await stop_note(store, "a") is None


async def test_the_end_of_a_run_waits_until_every_remote_process_was_told() -> None:
    store = InMemoryLightningStore()
    remote, other = RemoteRunners("a", "host-1", 2), RemoteRunners("b", "host-2", 2)
    await remote.report(store)
    await other.report(store)
    assert len(await remote_runners(store, "a")) == 1
    note = await stop_run(store, "a", reason="over")
    telling = asyncio.create_task(until_told(store, "a", note, seconds=30, all_are_away=True))
    await asyncio.sleep(0.3)
    assert not telling.done()
    await remote.report(store, told=True)
    await asyncio.wait_for(telling, 10)


async def test_the_end_of_a_run_waits_for_workers_of_a_remote_process_that_has_not_come_yet_but_not_for_ever() -> None:
    store = InMemoryLightningStore()
    await store.update_worker("worker-of-nobody", run_id="a")
    note = await stop_run(store, "a", reason="over")
    began = time.monotonic()
    await until_told(store, "a", note, seconds=0.3, all_are_away=True)
    assert time.monotonic() - began >= 0.3
    await asyncio.wait_for(until_told(store, "a", note, seconds=30, all_are_away=False), 10)
