"""Small bundles on a real store for the tests of the strategies. At module level, so that they can be spawned."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentlightning.execution import ExecutionEvent
from agentlightning.store import LightningStore
from agentlightning.types import Rollout


@dataclass
class Tasks:
    """An algorithm: enqueues `count` rollouts, waits for their ends and returns the pids of their runners."""

    count: int = 4
    config: Any = None

    async def __call__(self, store: LightningStore, event: ExecutionEvent) -> list[int]:
        rollouts = [await store.enqueue_rollout({"task": i}, config=self.config) for i in range(self.count)]
        done = await store.wait_for_rollouts(rollout_ids=[r.rollout_id for r in rollouts], timeout=90)
        assert len(done) == self.count
        return [await _pid_of(store, rollout) for rollout in done]


async def _pid_of(store: LightningStore, rollout: Rollout) -> int:
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    assert attempt is not None
    return int((attempt.metadata or {})["pid"])


@dataclass
class Serve:
    """A runner: claims and finishes rollouts until the event, or until it has done `cap`."""

    cap: int | None = None

    async def __call__(self, store: LightningStore, worker_id: int, event: ExecutionEvent) -> int:
        done = 0
        while not event.is_set() and (self.cap is None or done < self.cap):
            claim = await store.dequeue_rollout(worker_id=f"worker-{worker_id}", timeout=0.05)
            if claim is None:
                continue
            await self.work()
            rollout_id, attempt_id = claim.rollout_id, claim.attempt.attempt_id
            await store.update_attempt(rollout_id, attempt_id, status="succeeded", metadata={"pid": os.getpid()})
            done += 1
        return done

    async def work(self) -> None:
        """Run one rollout."""


@dataclass
class DieOnce(Serve):
    """A runner that is killed once, before it claims anything; the restarted one works."""

    mark: Path = Path()

    async def __call__(self, store: LightningStore, worker_id: int, event: ExecutionEvent) -> int:
        if not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().__call__(store, worker_id, event)


async def killed_at_the_end(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
    while not event.is_set():  # noqa: ASYNC110 -- it is set by another process
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class AtWork:
    """A runner that reports itself in the store, and then works like `runner`."""

    runner: Any

    async def __call__(self, store: LightningStore, worker_id: int, event: ExecutionEvent) -> Any:
        await store.update_worker(f"worker-{worker_id}")
        return await self.runner(store, worker_id, event)


async def until_one_is_at_work(store: LightningStore, event: ExecutionEvent) -> str:
    """An algorithm that ends once a runner is at work."""
    while await store.get_worker_by_id("worker-0") is None:  # noqa: ASYNC110 -- it is in another process
        await asyncio.sleep(0.01)
    return "at work"


async def broken_runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
    raise LookupError(f"worker {worker_id} found nothing")


async def broken_algorithm(store: LightningStore, event: ExecutionEvent) -> None:
    raise TimeoutError("the algorithm gave up")


async def patient_algorithm(store: LightningStore, event: ExecutionEvent) -> str:
    await asyncio.Event().wait()
    return "never"


async def deaf_runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
    """A runner that never looks at the event, but can be cancelled."""
    await asyncio.Event().wait()


async def blocking_runner(store: LightningStore, worker_id: int, event: ExecutionEvent) -> None:
    """A runner that blocks its event loop, and catches its cancellation."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            _block()


def _block() -> None:
    time.sleep(0.1)
