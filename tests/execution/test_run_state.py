"""The recorded state of a run for each way in which it ends, by each strategy."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from agentlightning.execution import (
    ClientServerExecutionStrategy,
    ExecutionEvent,
    SharedMemoryExecutionStrategy,
    StrandedWorkError,
    stop_run,
)
from agentlightning.execution.events import ThreadingEvent
from agentlightning.execution.remote import heed
from agentlightning.execution.run_state import (
    CONTROL_PREFIX,
    HAS_ENDED,
    RemoteRunners,
    StopNote,
    remote_runners,
    stop_note,
    until_told,
)
from agentlightning.execution.supervisor import until_set
from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.types.runs import Run
from tests.execution.bundles import patient_algorithm
from tests.stubs.ports import free_port

STRATEGIES: dict[str, Any] = {
    "shm, runner on the main thread": lambda: SharedMemoryExecutionStrategy(graceful_delay=0.2),
    "shm, algorithm on the main thread": lambda: SharedMemoryExecutionStrategy(n_runners=2, graceful_delay=0.2),
    "cs": lambda: ClientServerExecutionStrategy(server_port=0, graceful_timeout=0.2),
    "cs, algorithm alone": lambda: ClientServerExecutionStrategy(
        "algorithm", server_port=free_port(), graceful_timeout=0.2
    ),
}
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
with_runners = pytest.mark.parametrize("strategy", list(STRATEGIES.values())[:3], ids=list(STRATEGIES)[:3])


async def no_runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
    await until_set(event, 0.02)


async def good(store: LightningStore, event: ExecutionEvent) -> str:
    run = await store.get_run_by_id("")
    assert run is not None
    assert (run.state, run.starts) == ("running", 1)
    return "result"


async def bad(store: LightningStore, event: ExecutionEvent) -> str:
    raise ValueError("no such planet: api_key=abcdefgh")


async def told(store: LightningStore, event: ExecutionEvent) -> None:
    await stop_run(store, None, reason="enough")
    await patient_algorithm(store, event)


def run_of(store: InMemoryLightningStore) -> Run:
    run = asyncio.run(store.get_run_by_id(""))
    assert run is not None
    return run


@each_strategy
def test_a_result_is_a_success(strategy: Any) -> None:
    store = InMemoryLightningStore()
    assert strategy().execute(good, no_runner, store) == "result"
    run = run_of(store)
    assert (run.state, run.error, run.stop_reason) == ("succeeded", None, None)
    assert run.end_time is not None


@each_strategy
def test_an_exception_is_a_failure_with_its_text_and_without_its_secrets(strategy: Any) -> None:
    store = InMemoryLightningStore()
    with pytest.raises(ValueError, match="planet"):
        strategy().execute(bad, no_runner, store)
    run = run_of(store)
    assert run.error is not None
    assert (run.state, run.error.type) == ("failed", "ValueError")
    assert run.error.message == "no such planet: api_key=[hidden]"
    assert "in bad" in (run.error.traceback or "")
    assert "abcdefgh" not in run.model_dump_json()


@each_strategy
def test_a_run_that_was_told_to_stop_is_stopped(strategy: Any) -> None:
    store = InMemoryLightningStore()
    assert strategy().execute(told, no_runner, store) is None
    run = run_of(store)
    assert (run.state, run.stop_reason, run.error) == ("stopped", "enough", None)


@with_runners
def test_a_run_without_runners_for_its_work_has_failed(strategy: Any) -> None:
    async def algorithm(store: LightningStore, event: ExecutionEvent) -> None:
        await store.enqueue_rollout("x")
        await patient_algorithm(store, event)

    async def leaves(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None: ...

    store = InMemoryLightningStore()
    with pytest.raises(StrandedWorkError):
        strategy().execute(algorithm, leaves, store)
    run = run_of(store)
    assert run.error is not None
    assert (run.state, "StrandedWorkError" in run.error.type) == ("failed", True)


@each_strategy
def test_a_run_that_is_started_again_is_open_again(strategy: Any) -> None:
    async def again(store: LightningStore, event: ExecutionEvent) -> int:
        run = await store.get_run_by_id("")
        assert run is not None
        assert (run.state, run.error, run.end_time) == ("running", None, None)
        return run.starts

    store = InMemoryLightningStore()
    with pytest.raises(ValueError, match="planet"):
        strategy().execute(bad, no_runner, store)
    assert strategy().execute(again, no_runner, store) == 2


async def stops_its_run(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
    """A runner that asks the run to end until it does: a request before the algorithm starts does not count."""
    while not event.is_set():
        await stop_run(store, None, reason="enough")
        await asyncio.sleep(0.1)


@with_runners
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
    monkeypatch.setattr("agentlightning.execution.remote.LOOK_SECONDS", 0.01)
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
