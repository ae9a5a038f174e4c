"""A fit whose agent leaves processes behind, of every kind: `python -m tests.execution.children_program LAYOUT PLAY`.

It prints `child <kind> <pid>` for each of them, and `ready` when a rollout hangs in the hands of a runner.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import agentlightning as agl
from agentlightning.store import LightningStore
from agentlightning.types import Dataset
from tests.execution.fit_parts import runs_tasks

PROCESSES: dict[str, Any] = {"type": "cs", "server_port": 0}
LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "fork": ({**PROCESSES, "start_method": "fork"}, "thread"),
    "fork without restarts": ({**PROCESSES, "start_method": "fork", "max_runner_restarts": 0}, "thread"),
    "spawn": ({**PROCESSES, "start_method": "spawn"}, "thread"),
    "forkserver": ({**PROCESSES, "start_method": "forkserver"}, "thread"),
    "fork, agents in processes": ({**PROCESSES, "start_method": "fork"}, "process"),
}
LIFETIME = "120"


def forked() -> None:
    """A plain copy of the process, with all that was open in it."""
    if (pid := os.fork()) == 0:
        time.sleep(float(LIFETIME))
        os._exit(0)
    _tell("forked", pid)


def started() -> None:
    """A program in the group of the process."""
    _tell("started", subprocess.Popen(["sleep", LIFETIME]).pid)


def in_a_session_of_its_own() -> None:
    """A program that no signal to a group reaches."""
    _tell("session", subprocess.Popen(["sleep", LIFETIME], start_new_session=True).pid)


def of_multiprocessing() -> None:
    """One that Python joins when the process ends, in a process that may have children."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(float(LIFETIME),))
    process.start()
    _tell("multiprocessing", process.pid)


def daemonised() -> None:
    """An orphan in a session of its own that holds every descriptor, as a daemon does."""
    if (between := os.fork()) == 0:
        os.setsid()
        if (pid := os.fork()) == 0:
            time.sleep(float(LIFETIME))
        else:
            _tell("daemonised", pid)
        os._exit(0)
    os.waitpid(between, 0)


def deaf() -> None:
    """A program that ignores SIGTERM."""
    _tell("deaf", subprocess.Popen(["/bin/sh", "-c", f"trap '' TERM INT HUP; sleep {LIFETIME}"]).pid)


KINDS: tuple[Callable[[], None], ...] = (forked, started, in_a_session_of_its_own, of_multiprocessing, daemonised, deaf)


def _tell(kind: str, pid: int | None) -> None:
    os.write(1, f"child {kind} {pid}\n".encode())  # whole lines, from every process


@agl.rollout
async def leaves_children(task: str) -> float:
    """Starts one child of each kind, and acts by its task."""
    for start in KINDS:
        start()
    if task == "dies":
        os._exit(3)
    if task == "hangs":
        os.write(1, b"ready\n")
        await asyncio.Event().wait()
    return 1.0


@agl.algo
async def runs_all(*, store: LightningStore, train_dataset: Dataset[str]) -> None:
    await runs_tasks(store=store, train_dataset=train_dataset)


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    layout, task = sys.argv[1:]
    strategy, isolation = LAYOUTS[layout]
    runner: Any = agl.LitAgentRunner(agl.OtelTracer(), isolation=isolation)
    trainer = agl.Trainer(algorithm=runs_all, strategy=strategy, runner=runner)
    trainer.fit(leaves_children, train_dataset=[task])
    print("returned", flush=True)


if __name__ == "__main__":
    main()
