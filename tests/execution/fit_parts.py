"""Agents, algorithms and runners for whole fits, at module level, so that they can be spawned."""

from __future__ import annotations

import asyncio
import os
import signal
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
    """An agent that raises."""
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
    """Enqueue every task and return the ids."""
    await store.add_resources({})
    rollouts = [await store.enqueue_rollout(tasks[i], resources_id=resources_id) for i in range(len(tasks))]
    return [rollout.rollout_id for rollout in rollouts]


@agl.algo
async def runs_tasks(*, store: LightningStore, train_dataset: Dataset[int]) -> list[Any]:
    """Run every task; returns for each [status, final reward, whether each span is of this rollout, worker]."""
    ids = await enqueue(store, train_dataset)
    await store.wait_for_rollouts(rollout_ids=ids, timeout=25)
    seen: list[Any] = []
    for rollout_id in ids:
        spans = list(await store.query_spans(rollout_id))
        attempt = await store.get_latest_attempt(rollout_id)
        assert attempt is not None
        own = [span.attributes["of"] == rollout_id for span in spans if "of" in span.attributes]
        seen.append([attempt.status, agl.find_final_reward(spans), own, attempt.worker_id])
    return seen


@agl.algo
async def misses_its_resources(*, store: LightningStore, train_dataset: Dataset[int]) -> list[Any]:
    """Enqueue with resources that nobody published; returns [status, outcome, reason] of each."""
    ids = await enqueue(store, train_dataset, "nobody-published-this")
    await store.wait_for_rollouts(rollout_ids=ids, timeout=25)
    attempts = [await store.get_latest_attempt(rollout_id) for rollout_id in ids]
    return [[a.status, a.outcome, a.outcome_reason] for a in attempts if a is not None]


@agl.algo
async def leaves_them_running(*, store: LightningStore, train_dataset: Dataset[int]) -> list[str]:
    """Return while the rollouts are in the hands of the runners."""
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
    """Raise while the rollouts are in the hands of the runners."""
    await leaves_them_running(store=store, train_dataset=train_dataset)
    raise TimeoutError("the algorithm gave up")
