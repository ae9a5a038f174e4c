"""Small parts for the tests of the Trainer, at module level, so that they can be spawned and imported by path."""

from __future__ import annotations

import os
from typing import Any

import agentlightning as agl
from agentlightning.store import LightningStore
from agentlightning.types import Dataset


@agl.rollout
def tenth(task: int) -> float:
    return task / 10


@agl.algo
async def run_tasks(*, store: LightningStore, train_dataset: Dataset[Any]) -> list[tuple[str, int]]:
    """An algorithm: runs every task and returns the statuses with the pids of the workers that ran them."""
    await store.add_resources({})
    rollouts = [await store.enqueue_rollout(train_dataset[i], mode="train") for i in range(len(train_dataset))]
    done = await store.wait_for_rollouts(rollout_ids=[r.rollout_id for r in rollouts], timeout=30)
    attempts = [await store.get_latest_attempt(rollout.rollout_id) for rollout in done]
    return [(a.status, int((a.worker_id or "").split("-")[-2])) for a in attempts if a is not None]


class OwnRunner(agl.LitAgentRunner[Any]):
    """A runner of the user's that takes what the Trainer gives."""


class PlainRunner(agl.Runner[Any]):
    async def iter(self, *, event: Any = None) -> None:
        """Serve nothing."""


class Needy(agl.Algorithm):
    """An algorithm with a setting that must be given."""

    def __init__(self, rate: float, *, width: int = 1) -> None:
        self.rate, self.width = rate, width


def make_store() -> agl.InMemoryLightningStore:
    return agl.InMemoryLightningStore()


def here() -> int:
    return os.getpid()
