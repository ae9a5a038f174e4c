"""`agl runner`, with one runner or several: it is started again when it dies, leaves nothing, ends with a true code."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentlightning.execution import stop_run, subreaper
from agentlightning.execution import team as processes
from agentlightning.execution.children import ChildExit, ChildReport
from agentlightning.execution.events import ThreadingEvent
from agentlightning.store import LightningStoreClient
from tests.stubs.processes import Process, Terminal, assert_gone, lives, run_program

LIMIT_SECONDS = 60
AGENT = """
import os, subprocess, threading, time
import agentlightning as agl


@agl.rollout
def agent(task: str) -> float:
    if task == "dies":
        os._exit(0)
    if task == "dies once" and not os.path.exists("dead"):
        open("dead", "w").close()
        os._exit(0)
    if task == "dies when idle":
        threading.Timer(1.0, lambda: os._exit(0)).start()
    if task == "hangs":
        pids = [subprocess.Popen(["sleep", "120"], start_new_session=own).pid for own in (False, True)]
        if (pid := os.fork()) == 0:
            time.sleep(120)
            os._exit(0)
        with open("pids.part", "w") as file:
            print(os.getpid(), *pids, pid, file=file)
        os.rename("pids.part", "pids")
        time.sleep(120)
    if task == "takes its time":
        open("running", "w").close()
        time.sleep(2)
    return 1.0


class Unpicklable:
    async def __call__(self, store, worker_id, event):
        print("ran in", os.getpid())

    def __reduce__(self):
        raise TypeError("a lock of mine")
"""


@pytest.fixture
async def store(tmp_path: Path, client: LightningStoreClient) -> LightningStoreClient:
    """A served store, and beside it a folder with an agent."""
    (tmp_path / "agent.py").write_text(AGENT)
    return client


Start = Callable[..., Process]


@pytest.fixture
def start(store: LightningStoreClient, terminal: Terminal) -> Start:
    return lambda *more: terminal(f"agl runner agent.py:agent --store {store.server_address_root}", *more)


async def _text_of(path: Path) -> str:
    """Wait until there is such a file, and return its text."""

    def wait() -> str:
        end = time.monotonic() + LIMIT_SECONDS
        while not path.exists():
            assert time.monotonic() < end, f"{path.name} never came"
            time.sleep(0.02)
        return path.read_text()

    return await asyncio.to_thread(wait)


async def _outcomes(store: LightningStoreClient, rollout_ids: list[str]) -> list[list[str | None]]:
    """Wait for the ends, and return how each attempt of each rollout ended."""
    await store.wait_for_rollouts(rollout_ids=rollout_ids, timeout=LIMIT_SECONDS)
    return [[a.outcome_reason or a.outcome for a in await store.query_attempts(i)] for i in rollout_ids]


async def test_a_lone_runner_that_dies_with_code_0_is_started_again_and_the_others_are_run(
    store: LightningStoreClient, start: Start
) -> None:
    tasks = ["a", "dies once", "b", "dies", "c"]
    ids = [(await store.enqueue_rollout(task)).rollout_id for task in tasks]
    runner = start()
    died = "runner_died"
    assert await _outcomes(store, ids) == [["scored"], [died, "scored"], ["scored"], [died] * 4, ["scored"]]
    assert runner.code is None
    assert await asyncio.to_thread(runner.interrupted, signal.SIGTERM) == 143


@pytest.mark.heavy
@pytest.mark.parametrize("runners", ["1", "2"])
async def test_one_that_dies_with_nothing_in_hand_has_not_ended_the_run(
    store: LightningStoreClient, start: Start, runners: str
) -> None:
    runner = start("--run", "r", "--runners", runners)
    for times in (1, 2):
        rollout = await store.enqueue_rollout("dies when idle", run_id="r")
        assert await _outcomes(store, [rollout.rollout_id]) == [["scored"]]
        await asyncio.to_thread(runner.until, "(?s)" + "restart.*\n.*" * times)
    await stop_run(store, "r")
    assert await asyncio.to_thread(runner.ended) == 0


async def test_one_that_dies_again_and_again_is_a_failure(store: LightningStoreClient, start: Start) -> None:
    for _ in range(4):
        await store.enqueue_rollout("dies")
    runner = start("--log-level", "ERROR")
    assert await asyncio.to_thread(runner.ended) == 1
    assert "max_runner_restarts=3" in runner.said


@pytest.mark.heavy
@pytest.mark.parametrize("runners", ["1", "2"])
@pytest.mark.parametrize(
    ("signals", "code"),
    [([signal.SIGINT], 130), ([signal.SIGINT, signal.SIGINT], 130), ([signal.SIGTERM], 143), ([signal.SIGKILL], -9)],
)
async def test_it_leaves_no_process_however_it_is_ended(
    store: LightningStoreClient,
    start: Start,
    tmp_path: Path,
    runners: str,
    signals: list[signal.Signals],
    code: int,
) -> None:
    await store.enqueue_rollout("hangs")
    runner = start("--runners", runners)
    pids = [int(pid) for pid in (await _text_of(tmp_path / "pids")).split()]
    assert all(map(lives, pids))
    family = runner.family()
    for signum in signals:
        (os.kill if signum == signal.SIGKILL else os.killpg)(runner.popen.pid, signum)
        await asyncio.sleep(0.05)
    assert await asyncio.to_thread(runner.ended) == code
    await asyncio.to_thread(assert_gone, [*pids, *family])


@pytest.mark.heavy
async def test_a_group_that_is_terminated_finishes_what_it_runs(
    store: LightningStoreClient, terminal: Terminal, tmp_path: Path
) -> None:
    """SIGTERM goes to the runner process as well, as from a service manager or a batch system."""
    (tmp_path / "program.py").write_text(
        "import sys\nimport agentlightning as agl\nfrom agent import agent\n"
        "role = {'type': 'cs', 'role': 'runner', 'managed_store': False}\n"
        "agl.Trainer(strategy=role, store=agl.LightningStoreClient(sys.argv[1])).fit(agent)\n"
    )
    rollout = await store.enqueue_rollout("takes its time")
    program = terminal(f"python program.py {store.server_address_root}")
    await _text_of(tmp_path / "running")
    processes = program.family()[1:]
    os.killpg(program.popen.pid, signal.SIGTERM)
    await asyncio.sleep(0.2)
    for process in processes:  # as the subreaper does, which passes its own one on
        process.terminate()
    assert await _outcomes(store, [rollout.rollout_id]) == [["scored"]]
    assert await asyncio.to_thread(program.ended) == 143


@pytest.mark.parametrize(
    ("exitcode", "error", "name"),
    [(69, "StoreUnreachableError: away", "StoreUnreachableError"), (77, "UnauthorizedError: no", "UnauthorizedError")],
)
async def test_what_ends_every_runner_for_good_keeps_its_exit_code(exitcode: int, error: str, name: str) -> None:
    """The runner may get it before the watch of its parent does."""
    team = processes.ProcessTeam(_Ended(exitcode, error), 1, ThreadingEvent(), alone=True)
    team.start()
    with pytest.raises(Exception, match=error) as caught:
        await team.watch()
    assert type(caught.value).__name__ == name


class _Ended:
    """Children that ended before the first check."""

    look_seconds = 0.0

    def __init__(self, exitcode: int, error: str) -> None:
        self._exit = ChildExit(0, "runner-0", exitcode, ChildReport(cause=error, restart_helps=False), pid=1)

    def start(self, index: int) -> None: ...

    def filenos(self) -> list[int]:
        return []

    def collect(self) -> list[ChildExit]:
        return [self._exit]

    def signal(self, index: int, signum: int) -> None: ...

    def close(self) -> None: ...


async def _task(index: int, event: Any) -> None: ...


def test_only_what_cannot_be_a_child_is_run_in_the_process_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def local(index: int, event: Any) -> None: ...

    assert processes.obstacle_to_children("fork", local) is None
    assert processes.obstacle_to_children("spawn", _task) is None
    assert "cannot be pickled" in str(processes.obstacle_to_children("spawn", local))
    monkeypatch.setattr(subreaper, "_ACCELERATORS", (str(tmp_path),))
    with open(tmp_path / "device0", "w"):
        assert "accelerator" in str(processes.obstacle_to_children("fork", _task))


@pytest.mark.heavy
async def test_a_runner_that_cannot_be_spawned_is_run_here_and_that_is_said(
    store: LightningStoreClient, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(
        "import logging, os, sys\nimport agentlightning as agl\nfrom agent import Unpicklable\n"
        "if __name__ == '__main__':\n"
        "    logging.basicConfig()\n"
        "    print(os.getpid())\n"
        "    role = dict(role='runner', managed_store=False, start_method='spawn')\n"
        "    store = agl.LightningStoreClient(sys.argv[1])\n"
        "    agl.ClientServerExecutionStrategy(**role).execute(None, Unpicklable(), store)\n"
    )
    address = store.server_address_root
    program = await asyncio.to_thread(run_program, "python", "program.py", address, folder=tmp_path)
    pid, message = program.stdout.splitlines()
    assert message == f"ran in {pid}", program.stderr
    assert "The runner runs in this process" in program.stderr
    assert "a lock of mine" in program.stderr
