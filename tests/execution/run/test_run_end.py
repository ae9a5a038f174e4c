"""How each way in which a run ends is written down, by each strategy."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentlightning.execution import (
    ClientServerExecutionStrategy,
    ExecutionEvent,
    SharedMemoryExecutionStrategy,
    StrandedWorkError,
    stop_run,
)
from agentlightning.execution.run.supervisor import until_set
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


async def no_runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
    """A runner that waits for the end."""
    await until_set(event, 0.02)


async def good(store: LightningStore, event: ExecutionEvent) -> str:
    """An algorithm with a result."""
    run = await store.get_run_by_id("")
    assert run is not None
    assert (run.state, run.starts) == ("running", 1)
    return "result"


async def bad(store: LightningStore, event: ExecutionEvent) -> str:
    """An algorithm that fails."""
    raise ValueError("no such planet: api_key=abcdefgh")


async def told(store: LightningStore, event: ExecutionEvent) -> None:
    """An algorithm that is told to stop."""
    await stop_run(store, None, reason="enough")
    await patient_algorithm(store, event)


def run_of(store: InMemoryLightningStore) -> Run:
    """The run without a name."""
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


@pytest.mark.parametrize("strategy", list(STRATEGIES.values())[:3], ids=list(STRATEGIES)[:3])
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
