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
from agentlightning.execution.run.stop_note import (
    CONTROL_PREFIX,
    RemoteRunners,
    remote_runners,
    reopen_run,
    stop_note,
    tell_remote_runners,
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


async def test_notes_of_runs_are_kept_apart_and_are_no_workers() -> None:
    store = InMemoryLightningStore()
    await stop_run(store, "a", reason="over")
    note = await stop_note(store, "a")
    assert note is not None
    assert note.reason == "over"
    assert await stop_note(store, None) is None
    await reopen_run(store, "a")
    assert await stop_note(store, "a") is None
    assert (await store.query_workers()).total == (await store.statistics()).get("total_workers") == 0
    assert (await store.query_workers(worker_id_contains=CONTROL_PREFIX)).total == 1


async def test_the_end_of_a_run_waits_until_every_remote_process_was_told() -> None:
    store = InMemoryLightningStore()
    remote, other = RemoteRunners("a", "host-1", 2), RemoteRunners("b", "host-2", 2)
    await remote.report(store)
    await other.report(store)
    assert len(await remote_runners(store, "a")) == 1
    telling = asyncio.create_task(tell_remote_runners(store, "a", reason="over", seconds=30, all_are_away=True))
    while await stop_note(store, "a") is None:  # noqa: ASYNC110 -- only the store knows
        await asyncio.sleep(0)
    assert not telling.done()
    await remote.report(store, told=True)
    await asyncio.wait_for(telling, 10)


async def test_the_end_of_a_run_waits_for_workers_of_a_remote_process_that_has_not_come_yet_but_not_for_ever() -> None:
    store = InMemoryLightningStore()
    await store.update_worker("worker-of-nobody", run_id="a")
    began = time.monotonic()
    await tell_remote_runners(store, "a", reason="over", seconds=0.3, all_are_away=True)
    assert time.monotonic() - began >= 0.3
    await asyncio.wait_for(tell_remote_runners(store, "a", reason="over", seconds=30, all_are_away=False), 10)
