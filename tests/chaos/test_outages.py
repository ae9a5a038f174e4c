"""A run continues after all its processes were stopped for a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agentlightning.store import LightningStoreClient
from tests.stubs.ports import free_port
from tests.stubs.processes import Process, Terminal

ROOT = Path(__file__).parents[2]
STILL_SECONDS = 90.0
"""More than the 60 seconds for which a store may be unreachable."""
REWARDS = "rewards [0.1, 0.2, 0.3]"


@pytest.fixture
def machine(terminal: Terminal) -> Callable[..., Process]:
    """Starts `machine_program.py` with the environment of one machine."""

    def start(role: str, port: int, **environment: str) -> Process:
        own = {"AGL_CURRENT_ROLE": role, "AGL_SERVER_HOST": "127.0.0.1", "AGL_SERVER_PORT": str(port)}
        return terminal("python -m tests.execution.machine_program", folder=ROOT, **{**own, **environment})

    return start


def stand_still(*processes: Process) -> None:
    """Stop all processes and their children, and let all go on after `STILL_SECONDS`."""
    family = [each for process in processes for each in process.family()]
    for each in family:
        each.suspend()
    time.sleep(STILL_SECONDS)  # the fault itself
    for each in reversed(family):  # clients first: the server is the last to come back
        each.resume()


async def run_one_more(port: int) -> str:
    """Enqueue a task and return the status with which it ends."""
    client = LightningStoreClient(f"http://127.0.0.1:{port}")
    try:
        rollout = await client.enqueue_rollout(4)
        ended = await client.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=60)
        return ended[0].status if ended else "not ended"
    finally:
        await client.close()


@pytest.mark.timeout(300)
def test_an_idle_run_goes_on_after_all_its_processes_stood_still(machine: Callable[..., Process]) -> None:
    port = free_port()
    algorithm, runners = machine("algorithm", port, ALGORITHM="stays"), machine("runner", port, SLOW="0")
    algorithm.until("rewards")
    time.sleep(8.0)  # into a question for work that is held open
    stand_still(algorithm, runners)
    assert asyncio.run(run_one_more(port)) == "succeeded"
    assert (algorithm.code, runners.code) == (None, None)


@pytest.mark.timeout(300)
def test_a_step_goes_on_after_all_its_processes_stood_still(machine: Callable[..., Process]) -> None:
    port = free_port()
    algorithm, runners = machine("algorithm", port), machine("runner", port, SLOW="3")
    runners.until("running")
    stand_still(algorithm, runners)
    assert REWARDS in algorithm.succeeded()
    runners.succeeded()
