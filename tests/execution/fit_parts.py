"""Agents, algorithms and runners for whole fits, at module level, so that they can be spawned."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil

import agentlightning as agl
from agentlightning.store import LightningStore
from agentlightning.types import AttemptedRollout, Dataset


@agl.rollout
async def echo(task: int, rollout: AttemptedRollout) -> float:
    """An agent that notes its task and rollout in a span, gives way to others, and earns its task."""
    agl.emit_annotation({"task": task, "of": rollout.rollout_id})
    await asyncio.sleep(0.01)
    return float(task)


@agl.rollout
async def hangs(task: int) -> float:
    """An agent that never ends by itself."""
    await asyncio.Event().wait()
    return 1.0


@agl.rollout
async def hangs_once_begun(task: str) -> float:
    """An agent that makes a file, named by its task, and never ends by itself."""
    Path(task).touch()  # noqa: ASYNC240 -- one call
    await asyncio.Event().wait()
    return 1.0


@agl.rollout
async def stops_its_process(task: str) -> float:
    """An agent that writes its process id to a file and stops its process, which heeds no signal then but SIGKILL."""
    Path(task).write_text(str(os.getpid()))  # noqa: ASYNC240 -- one call
    os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0


@agl.rollout
async def fails(task: int) -> float:
    raise LookupError(f"no answer to {task}")


@agl.rollout
async def kills_its_process(task: int) -> float:
    """An agent that takes its whole process along."""
    os._exit(3)


class BrokenRunner(agl.LitAgentRunner[Any]):
    """A runner that raises instead of serving."""

    async def iter(self, **_: Any) -> None:
        raise LookupError("the runner found nothing")


async def enqueue(store: LightningStore, tasks: Dataset[int], resources_id: str | None = None) -> list[str]:
    await store.add_resources({})
    rollouts = [await store.enqueue_rollout(tasks[i], resources_id=resources_id) for i in range(len(tasks))]
    return [rollout.rollout_id for rollout in rollouts]


@agl.algo
async def runs_tasks(*, store: LightningStore, train_dataset: Dataset[int]) -> list[Any]:
    """Run every task; returns for each [status, final reward, whether each span is of this rollout, worker]."""
    ids = await enqueue(store, train_dataset)
    await store.wait_for_rollouts(rollout_ids=ids, timeout=25)
    facts: list[Any] = []
    for rollout_id in ids:
        spans = list(await store.query_spans(rollout_id))
        attempt = await store.get_latest_attempt(rollout_id)
        assert attempt is not None
        own = [span.attributes["of"] == rollout_id for span in spans if "of" in span.attributes]
        facts.append([attempt.status, agl.find_final_reward(spans), own, attempt.worker_id])
    return facts


@agl.algo
async def misses_its_resources(*, store: LightningStore, train_dataset: Dataset[int]) -> list[Any]:
    """Enqueue with resources that nobody published; returns [status, outcome, reason] of each."""
    ids = await enqueue(store, train_dataset, "nobody-published-this")
    await store.wait_for_rollouts(rollout_ids=ids, timeout=25)
    attempts = [await store.get_latest_attempt(rollout_id) for rollout_id in ids]
    return [[a.status, a.outcome, a.outcome_reason] for a in attempts if a is not None]


@agl.algo
async def leaves_them_running(*, store: LightningStore, train_dataset: Dataset[int]) -> list[str]:
    """Return while runners run the rollouts."""
    ids = await enqueue(store, train_dataset)
    while (await store.query_rollouts(status_in=["preparing", "running"])).total < len(ids):  # noqa: ASYNC110 -- see below
        await asyncio.sleep(0.02)  # they are claimed by other processes
    return ids


@agl.algo
async def leaves_them_at_work(*, store: LightningStore, train_dataset: Dataset[str]) -> list[str]:
    """Return while the agents are at work: each has made the file that its task names."""
    ids = await enqueue(store, train_dataset)
    while not all(Path(task).exists() for task in train_dataset):  # noqa: ASYNC110, ASYNC240 -- made by others
        await asyncio.sleep(0.02)
    return ids


@agl.algo
async def leaves_them_stopped(*, store: LightningStore, train_dataset: Dataset[str]) -> list[str]:
    """Return once the process of each agent has stopped: each has written its id to the file that its task names."""
    ids = await leaves_them_at_work(store=store, train_dataset=train_dataset)
    while not all(_has_stopped(Path(task)) for task in train_dataset):  # noqa: ASYNC110 -- others stop
        await asyncio.sleep(0.02)
    return ids


def _has_stopped(written: Path) -> bool:
    pid = written.read_text()
    return bool(pid) and psutil.Process(int(pid)).status() == psutil.STATUS_STOPPED


@agl.algo
async def raises_meanwhile(*, store: LightningStore, train_dataset: Dataset[int]) -> None:
    """Raise while runners run the rollouts."""
    await leaves_them_running(store=store, train_dataset=train_dataset)
    raise TimeoutError("the algorithm gave up")


# --- synchronous agents ----------------------------------------------------------------------------------------------


def on_main_thread() -> float:
    return float(threading.current_thread() is threading.main_thread())


@agl.rollout
def rings(task: int) -> float:
    """A synchronous agent that sets an alarm, which only the main thread may, and earns 1.0 there."""
    rang = threading.Event()
    signal.signal(signal.SIGALRM, lambda *_: rang.set())
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    assert rang.wait(20)
    return on_main_thread()


@agl.rollout
def blocks(task: str) -> float:
    """A synchronous agent that blocks in a system call, and writes what ended the call to the file that is its task."""
    try:
        if task.endswith("socket"):
            near, far = socket.socketpair()
            with near, far:
                near.recv(1)
        else:
            time.sleep(600)
    except BaseException as error:
        Path(task).write_text(type(error).__name__)
        raise
    return 1.0


@agl.rollout
def swallows(task: int) -> float:
    """A synchronous agent that ignores so many interrupts as its task says; it earns 1.0 on the main thread."""
    for _ in range(task):
        with contextlib.suppress(BaseException):
            time.sleep(600)
    return on_main_thread()


@agl.rollout
def presses_ctrl_c(task: tuple[int, str]) -> float:
    """A synchronous agent that presses Ctrl+C in the process of its task, and writes what ended it to the file."""
    try:
        os.kill(task[0], signal.SIGINT)
        time.sleep(600)
    except BaseException as error:
        Path(task[1]).write_text(type(error).__name__)
        raise
    return 1.0


class Both(agl.LitAgent[int]):
    """An agent that trains by a synchronous method and validates by an asynchronous one."""

    def training_rollout(self, task: int, resources: Any, rollout: Any) -> float:
        return on_main_thread()

    async def validation_rollout_async(self, task: int, resources: Any, rollout: Any) -> float:
        return on_main_thread()


@agl.algo
async def ends_of(*, store: LightningStore, train_dataset: Dataset[Any]) -> list[Any]:
    """Run every task, one after another; returns the status of each attempt, its reason and the final reward."""
    await store.add_resources({})
    facts: list[Any] = []
    for i in range(len(train_dataset)):
        rollout = await store.enqueue_rollout(train_dataset[i])
        await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=60)
        attempt = await store.get_latest_attempt(rollout.rollout_id)
        if attempt is None:
            facts.append(["not run", None, None])
            continue
        reward = agl.find_final_reward(list(await store.query_spans(rollout.rollout_id)))
        facts.append([attempt.status, attempt.outcome_reason, reward])
    return facts
