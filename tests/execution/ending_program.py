"""A whole fit that is brought to an end, from inside or from outside: `python -m tests.execution.ending_program`.

Its arguments are a layout and what happens in it. It prints `ready <endpoint>` when a runner has a rollout that hangs,
and `threads ...` with what is left at the end; `endings.py` starts it, ends it, and looks what remains.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from typing import Any

import agentlightning as agl
from agentlightning.store import LightningStore
from agentlightning.types import Dataset
from tests.execution.fit_parts import (
    BrokenRunner,
    enqueue,
    fails,
    leaves_them_running,
    raises_meanwhile,
    runs_tasks,
)

PROCESSES: dict[str, Any] = {"type": "cs", "server_port": 0, "graceful_timeout": 1.0, "terminate_timeout": 2.0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "shm, runner on the main thread": {"type": "shm", "main_thread": "runner", "graceful_delay": 1.0},
    "shm, algorithm on the main thread": {"type": "shm", "main_thread": "algorithm", "graceful_delay": 1.0},
    "cs, fork": {**PROCESSES, "start_method": "fork"},
    "cs, spawn": {**PROCESSES, "start_method": "spawn"},
    "cs, forkserver": {**PROCESSES, "start_method": "forkserver"},
    "cs, runner in the main process": {**PROCESSES, "main_process": "runner"},
}


@agl.rollout
async def hangs_in_the_end(task: int) -> float:
    """An agent that answers the first task and hangs in the second."""
    if task > 1:
        await asyncio.Event().wait()
    return 1.0


@agl.algo
async def stays(*, store: LightningStore, train_dataset: Dataset[int]) -> None:
    """Have one rollout run and another pending at a runner, print `ready`, and stay."""
    await runs_tasks(store=store, train_dataset=[1])
    await leaves_them_running(store=store, train_dataset=[2])
    print("ready", getattr(getattr(store, "store", store), "endpoint", "-"), flush=True)
    await asyncio.Event().wait()


@agl.algo
async def leaves(*, store: LightningStore, train_dataset: Dataset[int]) -> None:
    """Return at once, with work in the queue."""
    await enqueue(store, train_dataset)


CASES: dict[str, tuple[Any, Any, Any]] = {
    "stays": (stays, hangs_in_the_end, None),
    "returns": (runs_tasks, hangs_in_the_end, None),
    "returns with work in the queue": (leaves, hangs_in_the_end, None),
    "algorithm raises": (raises_meanwhile, hangs_in_the_end, None),
    "runner raises": (runs_tasks, hangs_in_the_end, BrokenRunner),
    "agent raises": (runs_tasks, fails, None),
}


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    layout, case = sys.argv[1:]
    algorithm, agent, runner = CASES[case]
    strategy = dict(LAYOUTS[layout])
    if strategy["type"] == "cs":
        strategy["max_runner_restarts"] = 0
    trainer = agl.Trainer(algorithm=algorithm, runner=runner, strategy=strategy)
    tasks = [2] if case == "algorithm raises" else [1]
    try:
        trainer.fit(agent, train_dataset=tasks)
    finally:
        threads = [thread.name for thread in threading.enumerate() if not thread.daemon]
        print("threads", *threads, flush=True)


if __name__ == "__main__":
    main()
