"""`Evaluator` samples every task of a dataset and learns nothing; `Trainer.evaluate` runs it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from agentlightning.algorithm.collect import Evidence, collect, evidence
from agentlightning.algorithm.evaluation.result import SCORED, EvaluatedRollout, EvaluatedTask, EvaluationResult
from agentlightning.algorithm.fast import FastAlgorithm
from agentlightning.algorithm.runs.compare import tasks_of
from agentlightning.algorithm.utils import with_llm_proxy, with_timeout
from agentlightning.errors import BadRequestError
from agentlightning.types import Dataset, EnqueueRolloutRequest, Rollout

if TYPE_CHECKING:
    from agentlightning.llm_proxy import LLMProxy

ROLLOUT_SECONDS = 3600.0
"""Time limit of a rollout where the Trainer's `rollout_config` has none."""
_READ_AT_ONCE = 32
"""Rollouts whose spans are fetched at the same time."""


class Evaluator(FastAlgorithm):
    """Runs the agent on each task of `val_dataset` `n_samples` times in mode `val`, with the initial resources.

    Returns an `EvaluationResult`.
    """

    def __init__(self, n_samples: int = 1) -> None:
        self.n_samples = n_samples

    @override
    async def run(
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> EvaluationResult:
        if val_dataset is None or len(val_dataset) == 0:
            raise BadRequestError("an evaluation needs tasks; the dataset is empty")
        return await self._run_tasks([val_dataset[index] for index in range(len(val_dataset))])

    @with_llm_proxy()
    async def _run_tasks(self, llm_proxy: LLMProxy | None, tasks: list[Any]) -> EvaluationResult:
        began, store = time.monotonic(), self.get_store()
        resources_id = (await store.add_resources(self.get_initial_resources() or {})).resources_id
        limits = with_timeout(self.get_rollout_config(), ROLLOUT_SECONDS)
        requests = [
            EnqueueRolloutRequest(input=task, mode="val", resources_id=resources_id, config=limits)
            for task in tasks
            for _ in range(self.n_samples)
        ]
        seconds = limits.timeout_seconds or ROLLOUT_SECONDS
        attempts = limits.max_attempts + limits.infrastructure_retries
        rollouts = await collect(store, requests, timeout_seconds=seconds * attempts * len(requests))
        samples = await self._read(rollouts)
        groups = [tuple(samples[start : start + self.n_samples]) for start in range(0, len(samples), self.n_samples)]
        inputs = [rollout.input for rollout in rollouts[:: self.n_samples]]
        evaluated = tuple(EvaluatedTask(task, group) for task, group in zip(inputs, groups, strict=True))
        result = EvaluationResult(evaluated, time.monotonic() - began, rollouts[0].run_id)
        data = {"rewards": result.rewards, "outcomes": result.outcomes, "failures": result.failures}
        data |= {"tasks": tasks_of(inputs), "n_samples": self.n_samples, "seconds": result.seconds}
        await self.get_run_log().evaluation(0, "evaluation", data, value=result.mean_reward)
        return result

    async def _read(self, rollouts: Sequence[Rollout]) -> list[EvaluatedRollout]:
        store, read = self.get_store(), list[EvaluatedRollout]()
        for start in range(0, len(rollouts), _READ_AT_ONCE):
            found = await asyncio.gather(
                *(evidence(store, r, note=True) for r in rollouts[start : start + _READ_AT_ONCE])
            )
            read.extend(map(_sample, found))
        return read


def _sample(found: Evidence) -> EvaluatedRollout:
    latest, reward = found.latest, found.reward
    outcome = (latest.outcome if latest else None) or found.rollout.status
    seconds = 0.0 if latest is None else max(0.0, (latest.end_time or latest.start_time) - latest.start_time)
    failure = None
    if outcome not in SCORED or reward is None:
        reason = None if latest is None else latest.outcome_reason
        failure = latest.error.type if latest is not None and latest.error is not None else reason or outcome
    return EvaluatedRollout(found.rollout.rollout_id, outcome, reward, seconds, failure)
