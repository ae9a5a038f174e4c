"""The timer of a store when the process stops in the middle of a scan, and the path from a claim to its rule."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from agentlightning.store.engine.store import EngineStore
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.store.memory.store import MemoryBackend
from agentlightning.store.wrappers import LightningStoreScoped
from agentlightning.types import RolloutConfig
from tests.store.parts import required

LEASE = 10.0


class Machine:
    """A clock that a test sets, wall-clock and monotonic in one."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    clock = Machine()
    monkeypatch.setattr("agentlightning.store.engine.clock.monotonic", clock)
    monkeypatch.setattr("agentlightning.store.engine.runtime.monotonic", clock)
    return clock


def opened(machine: Machine) -> InMemoryLightningStore:
    store = InMemoryLightningStore(lease_seconds=LEASE, scan_debounce_seconds=1e9)
    store._runtime._timeline._wall_clock = machine
    store._runtime._timeline.__init__(machine)
    return store


async def statuses(store: InMemoryLightningStore, rollout_id: str) -> list[str]:
    return [attempt.status for attempt in await store.query_attempts(rollout_id)]


@pytest.mark.parametrize("limit", ["lease", "unresponsive_seconds"])
async def test_a_process_that_stands_still_in_the_middle_of_a_look_takes_nothing_from_workers_that_live(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    store = opened(machine)
    config = RolloutConfig(unresponsive_seconds=LEASE if limit == "unresponsive_seconds" else None)
    await store.update_worker("first")
    rollout = await store.start_rollout("x", config=config, worker_id="first")
    runtime = store._runtime
    execute: Callable[..., Any] = runtime.backend.execute

    def stands_still_first(script: Callable[..., Any], **options: Any) -> Any:
        machine.seconds += 5 * LEASE
        return execute(script, **options)

    machine.seconds += 0.1
    with monkeypatch.context() as patch:
        patch.setattr(runtime.backend, "execute", stands_still_first)
        runtime.scan_now()
    assert await statuses(store, rollout.rollout_id) == ["preparing"]
    runtime.scan_now()  # the next look notices the sleep; the worker's heartbeat is still on its way
    assert await statuses(store, rollout.rollout_id) == ["preparing"]
    for _ in range(50):
        machine.seconds += LEASE / 40
        runtime.scan_now()
    assert await statuses(store, rollout.rollout_id) == ["unresponsive"], (
        "a worker that stays silent is lost all the same"
    )
    await store.close()


class Watched(MemoryBackend):
    """A backend that records the functions of the package through which a script was called."""

    way: tuple[str, ...] = ()

    def execute(self, script: Callable[..., Any], *, write: bool = True) -> Any:
        frames = traceback.walk_stack(inspect.currentframe())
        self.way = tuple(f.f_code.co_name for f, _ in frames if "/agentlightning/store/" in f.f_code.co_filename)
        return super().execute(script, write=write)


async def test_a_claim_of_a_runner_comes_to_its_rule_by_few_calls() -> None:
    backend = Watched()
    store = LightningStoreScoped(EngineStore(backend), "r")
    await store.enqueue_rollout("x")
    required(await asyncio.ensure_future(store.dequeue_rollout(worker_id="w", timeout=1.0)))
    called = ("execute", *backend.way)  # and the runner's own `Claims._ask` before them
    assert called == ("execute", "write", "until", "dequeue_rollout", "checked")
