"""Evaluation of a policy on tasks that are never trained: one rollout per task, through the same path as training."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agentlightning.algorithm.collect import collect, evidence
from agentlightning.store.base import LightningStore
from agentlightning.types import EnqueueRolloutRequest, RolloutConfig

RIGHT = 0.5
"""A task counts as solved when its reward is above this."""


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation, in the order of the tasks."""

    step: int
    """Updates that the weights had seen."""
    sampling: str
    """`sampled` (at the temperature of training) or `greedy`."""
    rewards: list[float | None]
    """None where the rollout failed or earned nothing."""
    rollout_ids: list[str]
    seconds: float

    @property
    def solved(self) -> list[bool]:
        """Whether each task was solved; a failed rollout solved nothing."""
        return [reward is not None and reward > RIGHT for reward in self.rewards]

    @property
    def accuracy(self) -> float:
        """Share of the tasks that were solved."""
        return sum(self.solved) / len(self.rewards) if self.rewards else 0.0

    @property
    def failed(self) -> int:
        """Rollouts without a reward."""
        return sum(reward is None for reward in self.rewards)


async def evaluate_tasks(
    store: LightningStore,
    tasks: Sequence[object],
    *,
    step: int,
    sampling: str,
    resources_id: str,
    config: RolloutConfig,
    timeout_seconds: float,
    place: Mapping[str, object],
    on_done: Callable[[int], None] | None = None,
) -> Evaluation:
    """Run the agent on each task once with the given resources and return the rewards.

    `place` says where in the run this is: the rollouts have it in their metadata, with the number of their task.
    """
    began = time.monotonic()
    requests = [
        EnqueueRolloutRequest(
            input=task, mode="val", resources_id=resources_id, config=config, metadata={**place, "task": number}
        )
        for number, task in enumerate(tasks)
    ]
    rollouts = await collect(store, requests, timeout_seconds=timeout_seconds, on_done=on_done)
    rewards = [(await evidence(store, rollout)).reward for rollout in rollouts]
    ids = [rollout.rollout_id for rollout in rollouts]
    return Evaluation(step, sampling, rewards, ids, time.monotonic() - began)
