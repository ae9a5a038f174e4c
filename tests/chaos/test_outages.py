"""A run goes on where it was after its store was away, and after all its processes stood still."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from agentlightning.store import LightningStoreClient
from tests.chaos.running import Keeper
from tests.chaos.stores import open_store
from tests.stubs.ports import free_port

ROOT = Path(__file__).parents[2]
STILL_SECONDS = 90.0
"""Longer than the 60 seconds for which a store may be away."""
AWAY_SECONDS = 45.0
"""Shorter than them."""
REWARDS = "rewards [0.1, 0.2, 0.3]"


def machine(role: str, port: int, **environment: str) -> subprocess.Popen[str]:
    """Start `machine_program.py` with the environment of one machine."""
    own = {"AGL_CURRENT_ROLE": role, "AGL_SERVER_HOST": "127.0.0.1", "AGL_SERVER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.execution.machine_program"],
        cwd=ROOT,
        env={**os.environ, **own, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def until(process: subprocess.Popen[str], words: str) -> str:
    """Read what a process prints up to a line with the words."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return "".join(lines)
    raise AssertionError(f"it ended without saying {words!r}:\n{''.join(lines)}")


def stand_still(*processes: subprocess.Popen[str]) -> None:
    """Stop all processes and their children, and let all go on after `STILL_SECONDS`."""
    mains = [psutil.Process(process.pid) for process in processes]
    family = [each for main in mains for each in (main, *main.children(recursive=True))]
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
@pytest.mark.parametrize("state", ["idle", "in the middle of a step"])
def test_a_run_goes_on_after_all_its_processes_stood_still(state: str) -> None:
    port = free_port()
    idle = state == "idle"
    algorithm = machine("algorithm", port, **({"ALGORITHM": "stays"} if idle else {}))
    runners = machine("runner", port, SLOW="0" if idle else "3")
    try:
        if idle:
            until(algorithm, "rewards")
            time.sleep(8.0)  # into a question for work that is held open
        else:
            until(runners, "running")
        stand_still(algorithm, runners)
        if idle:
            assert asyncio.run(run_one_more(port)) == "succeeded"
            assert (algorithm.poll(), runners.poll()) == (None, None)
        else:
            told, heard = algorithm.communicate(timeout=60)[0], runners.communicate(timeout=60)[0]
            assert (algorithm.returncode, REWARDS in told) == (0, True), told
            assert runners.returncode == 0, heard
    finally:
        for process in (algorithm, runners):
            process.kill()
            process.communicate()


@pytest.mark.timeout(300)
def test_finished_work_is_kept_for_a_server_that_is_away_and_algorithm_and_runners_go_on(tmp_path: Path) -> None:
    keeper = Keeper(f"sqlite:///{tmp_path}/store.db", free_port(), lease_seconds=30.0)
    keeper.start()
    shared = {"AGL_MANAGED_STORE": "0", "AGENT_LIGHTNING_STORE_URL": f"http://127.0.0.1:{keeper.port}"}
    algorithm, runners = machine("algorithm", 0, **shared), machine("runner", 0, SLOW="2", N_RUNNERS="1", **shared)
    try:
        until(runners, "running")
        keeper.kill()
        time.sleep(AWAY_SECONDS)  # the fault itself
        keeper.start()
        told = algorithm.communicate(timeout=60)[0]
        assert (algorithm.returncode, REWARDS in told) == (0, True), told
    finally:
        for process in (algorithm, runners):
            process.kill()
            process.communicate()
        keeper.kill()
    assert asyncio.run(outcomes(keeper.spec)) == [["scored"]] * 3


async def outcomes(spec: str) -> list[list[str | None]]:
    """Return how the attempts of each rollout ended."""
    store = open_store(spec)
    try:
        found = await store.query_rollouts()
        return [[each.outcome for each in await store.query_attempts(rollout.rollout_id)] for rollout in found]
    finally:
        await store.close()
