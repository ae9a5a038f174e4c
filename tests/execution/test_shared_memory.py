"""Shared memory: several runners in one process, and an end whichever role has the main thread."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import time

import pytest

from agentlightning.execution import ExecutionEvent, SharedMemoryExecutionStrategy, StrandedWorkError
from agentlightning.execution.supervisor import until_set
from agentlightning.store import InMemoryLightningStore, LightningStore
from tests.execution.bundles import Serve, Tasks, broken_algorithm, broken_runner, deaf_runner, patient_algorithm

LAYOUTS = [("runner", 1), ("algorithm", 1), ("algorithm", 3)]


def strategy(main_thread: str = "algorithm", n_runners: int = 1) -> SharedMemoryExecutionStrategy:
    return SharedMemoryExecutionStrategy(n_runners=n_runners, main_thread=main_thread, graceful_delay=0.3)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    threads = {t.name for t in threading.enumerate() if t not in before and not t.name.startswith("left-behind")}
    assert not threads


def test_the_main_thread_is_chosen_by_the_number_of_runners() -> None:
    assert SharedMemoryExecutionStrategy().main_thread == "runner"
    assert SharedMemoryExecutionStrategy(n_runners=4).main_thread == "algorithm"


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"n_runners": 2, "main_thread": "runner"}, ValueError, "n_runners=1 or main_thread='algorithm'"),
        ({"main_thread": "both"}, ValueError, "main_thread must be one of 'algorithm', 'runner'; got 'both'"),
        ({"n_runners": 0}, ValueError, "n_runners must be at least 1; got 0"),
        ({"n_runners": True}, TypeError, "n_runners must be a whole number"),
        ({"graceful_delay": -1}, ValueError, "graceful_delay must be a finite number of seconds"),
        ({"join_timeout": "long"}, TypeError, "join_timeout must be a number of seconds"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(settings: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        SharedMemoryExecutionStrategy(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("main_thread", "n_runners", "text"), [("both", 1, "must be one of"), ("runner", 2, "allows one runner")]
)
def test_a_wrong_setting_that_is_set_later_is_refused_by_name(main_thread: str, n_runners: int, text: str) -> None:
    built = SharedMemoryExecutionStrategy()
    built.main_thread, built.n_runners = main_thread, n_runners  # type: ignore[assignment]
    with pytest.raises(ValueError, match=text):
        built.execute(Tasks(), Serve(), InMemoryLightningStore())


@pytest.mark.parametrize(("main_thread", "n_runners"), LAYOUTS)
def test_execute_returns_what_the_algorithm_returned_and_ends_the_runners(main_thread: str, n_runners: int) -> None:
    result = strategy(main_thread, n_runners).execute(Tasks(), Serve(), InMemoryLightningStore())
    assert result == [os.getpid()] * 4


def test_each_runner_has_a_number_a_thread_and_a_loop_of_its_own() -> None:
    contexts: list[tuple[int, threading.Thread, int]] = []
    all_here = threading.Barrier(4)

    async def runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        contexts.append((worker_id, threading.current_thread(), id(asyncio.get_running_loop())))
        await asyncio.to_thread(all_here.wait)
        await until_set(event, 0.01)

    async def algorithm(store: LightningStore, event: ExecutionEvent) -> None:
        await asyncio.to_thread(all_here.wait)

    strategy("algorithm", 3).execute(algorithm, runner, InMemoryLightningStore())
    threads = {worker_id: (thread.name, thread.daemon) for worker_id, thread, _ in contexts}
    assert threads == {i: (f"runner-{i}", True) for i in range(3)}
    assert len({loop for _, _, loop in contexts}) == 3


@pytest.mark.parametrize(("main_thread", "n_runners"), LAYOUTS)
def test_what_the_algorithm_raises_comes_out_unchanged(main_thread: str, n_runners: int) -> None:
    with pytest.raises(TimeoutError, match="the algorithm gave up"):
        strategy(main_thread, n_runners).execute(broken_algorithm, deaf_runner, InMemoryLightningStore())


@pytest.mark.parametrize(("main_thread", "n_runners"), LAYOUTS)
def test_what_a_runner_raises_ends_the_run_and_comes_out_unchanged(
    main_thread: str, n_runners: int, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(LookupError, match="found nothing"):
        strategy(main_thread, n_runners).execute(patient_algorithm, broken_runner, InMemoryLightningStore())
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize(("main_thread", "n_runners"), LAYOUTS)
def test_runners_that_end_while_work_is_open_end_the_run_with_an_error_of_its_own(
    main_thread: str, n_runners: int
) -> None:
    with pytest.raises(StrandedWorkError, match=r"1 rollout still open\. See the log"):
        strategy(main_thread, n_runners).execute(Tasks(n_runners + 1), Serve(cap=1), InMemoryLightningStore())


@pytest.mark.parametrize(("main_thread", "n_runners"), LAYOUTS)
def test_an_algorithm_may_go_on_after_every_runner_has_ended(main_thread: str, n_runners: int) -> None:
    async def algorithm(store: LightningStore, event: ExecutionEvent) -> str:
        await Tasks(n_runners)(store, event)
        await asyncio.sleep(0.6)
        return "finished"

    result = strategy(main_thread, n_runners).execute(algorithm, Serve(cap=1), InMemoryLightningStore())
    assert result == "finished"


@pytest.mark.parametrize("main_thread", ["runner", "algorithm"])
@pytest.mark.parametrize("looks", [True, False])
def test_a_runner_that_sets_the_event_ends_an_algorithm_which_is_cancelled_if_it_does_not_look(
    main_thread: str, looks: bool
) -> None:
    async def algorithm(store: LightningStore, event: ExecutionEvent) -> str:
        await until_set(event, 0.01)
        return "stopped"

    async def runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        event.set()

    run = strategy(main_thread).execute
    ended = run(algorithm if looks else patient_algorithm, runner, InMemoryLightningStore())
    assert ended == ("stopped" if looks else None)


@pytest.mark.parametrize(("main_thread", "n_runners"), LAYOUTS)
def test_a_runner_that_does_not_look_at_the_event_is_cancelled(main_thread: str, n_runners: int) -> None:
    cancelled: list[int] = []

    async def runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        try:
            await deaf_runner(store, worker_id, event)
        finally:
            cancelled.append(worker_id)

    async def algorithm(store: LightningStore, event: ExecutionEvent) -> str:
        await asyncio.sleep(0.05)
        return "done"

    assert strategy(main_thread, n_runners).execute(algorithm, runner, InMemoryLightningStore()) == "done"
    assert sorted(cancelled) == list(range(n_runners))


def test_a_thread_that_never_gives_way_is_left_behind_and_named(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    async def runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
        threading.current_thread().name = "left-behind"
        release.wait(20)

    async def algorithm(store: LightningStore, event: ExecutionEvent) -> str:
        return "done"

    impatient = SharedMemoryExecutionStrategy(main_thread="algorithm", graceful_delay=0.05, join_timeout=0.05)
    with caplog.at_level(logging.ERROR, "agentlightning"):
        assert impatient.execute(algorithm, runner, InMemoryLightningStore()) == "done"
    release.set()
    assert "runner-0 did not stop after cancellation; abandoning task" in caplog.text
    assert "These threads did not end: runner-0" in caplog.text


def test_execute_refuses_to_run_inside_a_running_loop() -> None:
    async def main() -> None:
        strategy().execute(Tasks(), Serve(), InMemoryLightningStore())

    with pytest.raises(RuntimeError, match=r"await asyncio\.to_thread"):
        asyncio.run(main())


def test_a_call_that_blocks_in_to_thread_does_not_hold_up_the_end() -> None:
    release = threading.Event()

    def block() -> None:
        threading.current_thread().name = "left-behind"
        release.wait(20)

    async def algorithm(store: LightningStore, event: ExecutionEvent) -> str:
        asyncio.get_running_loop().run_in_executor(None, block)
        await asyncio.sleep(0.05)
        return "done"

    began = time.monotonic()
    assert strategy().execute(algorithm, Serve(), InMemoryLightningStore()) == "done"
    assert time.monotonic() - began < 15
    release.set()
