"""`FastAlgorithm`, for algorithms without special hardware needs; `Baseline` runs an agent on every task."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeVar, get_args

from typing_extensions import override

from agentlightning.adapter.calls.calls import model_calls
from agentlightning.algorithm.base import Algorithm, ResultT
from agentlightning.algorithm.utils import running_llm_proxy
from agentlightning.base.terminal import counted
from agentlightning.errors import BadRequestError
from agentlightning.evaluation.tasks import tasks_of
from agentlightning.training.rollouts import Evidence, LatePolicy, collect, evidence
from agentlightning.training.tasks import items_of, with_timeout
from agentlightning.types import Dataset, EnqueueRolloutRequest, RolloutMode

logger = logging.getLogger(__name__)
T = TypeVar("T")
SpanVerbosity = Literal["none", "keys", "key_values"]


class FastAlgorithm(Algorithm[ResultT]):
    """An algorithm that is fast and needs no special hardware; `Trainer.dev` accepts only such algorithms."""

    async def _batch(self, dataset: Dataset[T] | None, size: int) -> AsyncGenerator[list[T]]:
        """Yield one pass over a dataset in its order, in batches of `size` tasks; the last batch may be smaller.

        `utils.batch_iter_over_dataset` yields endless passes in a random order.

        Raises:
            BadRequestError: there is no dataset, or `size` is not positive.
        """
        if dataset is None or size < 1:
            reason = "no dataset was given to fit" if dataset is None else f"size must be 1 or more; got {size}"
            raise BadRequestError(f"Cannot create batches: {reason}")
        for start in range(0, len(dataset), size):
            yield [dataset[index] for index in range(start, min(start + size, len(dataset)))]


@dataclass
class BaselineResult:
    """Rewards, outcomes and durations of the rollouts of a `Baseline` run."""

    rewards: list[float | None] = field(default_factory=list[float | None])
    """Reward of each rollout, in order; None if it failed or has no reward."""
    outcomes: dict[str, int] = field(default_factory=dict[str, int])
    seconds: list[float] = field(default_factory=list[float])
    """Duration of each rollout, in seconds."""
    first_error: str | None = None
    """Class and message of the error of the first failed attempt; None if no attempt failed."""

    @property
    def mean_reward(self) -> float | None:
        """Mean over the rollouts with a reward; None without rewards."""
        earned = [reward for reward in self.rewards if reward is not None]
        return math.fsum(earned) / len(earned) if earned else None

    def __str__(self) -> str:
        mean = "no reward" if self.mean_reward is None else f"mean reward {self.mean_reward:.3f}"
        outcomes = ", ".join(f"{number} {name}" for name, number in sorted(self.outcomes.items()))
        return f"{counted(len(self.rewards), 'rollout')} ({outcomes}), {mean}"


class Baseline(FastAlgorithm[BaselineResult]):
    """Run the agent on every task of both datasets and log the rollouts, as a smoke test of the agent.

    Args:
        n_epochs: number of passes over the datasets.
        max_queue_length: maximum number of rollouts that wait in the queue.
        span_verbosity: logged attributes of each span: `none`, their names (`keys`), or also values (`key_values`).
        timeout_seconds: seconds per batch of the queue after which an unfinished rollout is late.
        late_rollouts: handling of a late rollout: `drop` cancels it, `wait` restarts the time limit with each rollout
            that ends, `resubmit` cancels it and requeues its task once.

    Raises:
        BadRequestError: a value is out of range.
    """

    def __init__(
        self,
        *,
        n_epochs: int = 1,
        train_split: float | None = None,
        polling_interval: float | None = None,
        max_queue_length: int = 4,
        span_verbosity: SpanVerbosity = "keys",
        timeout_seconds: float = 3600.0,
        late_rollouts: LatePolicy = "drop",
    ) -> None:
        for name, value in (("train_split", train_split), ("polling_interval", polling_interval)):
            if value is not None:
                warnings.warn(f"Baseline({name}=...) has no effect; remove it", DeprecationWarning, stacklevel=2)
        if n_epochs < 1 or max_queue_length < 1:
            raise BadRequestError("n_epochs and max_queue_length must be 1 or more")
        if not timeout_seconds > 0:
            raise BadRequestError(f"timeout_seconds must be above 0; got {timeout_seconds}")
        if span_verbosity not in ("none", "keys", "key_values"):
            raise BadRequestError(f"span_verbosity must be none, keys or key_values; got {span_verbosity!r}")
        if late_rollouts not in get_args(LatePolicy):
            raise BadRequestError(f"late_rollouts must be drop, wait or resubmit; got {late_rollouts!r}")
        self.late_rollouts: LatePolicy = late_rollouts
        self.n_epochs = n_epochs
        self.max_queue_length = max_queue_length
        self.span_verbosity: SpanVerbosity = span_verbosity
        self.timeout_seconds = timeout_seconds

    @override
    def with_iterations(self, max_iterations: int) -> Self:
        """Return a copy that makes this many passes over the datasets."""
        twin = copy.copy(self)
        twin.n_epochs = max_iterations
        return twin

    @override
    async def run(
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> BaselineResult:
        """Run the agent on the tasks and return the rewards.

        Raises:
            BadRequestError: both datasets are empty.
        """
        tasks: list[tuple[object, RolloutMode]] = [(task, "train") for task in items_of(train_dataset)]
        tasks.extend((task, "val") for task in items_of(val_dataset))
        if not tasks:
            raise BadRequestError("Baseline needs tasks: pass train_dataset or val_dataset to fit")
        async with running_llm_proxy(self):
            return await self._run_tasks(tasks)

    async def _run_tasks(self, tasks: list[tuple[object, RolloutMode]]) -> BaselineResult:
        store, resources_id = self.get_store(), None
        initial = self.get_initial_resources()
        if initial is not None:
            resources_id = (await store.update_resources("default", initial)).resources_id
        # The time limit frees a runner whose agent hangs.
        limits = with_timeout(self.get_rollout_config(), self.timeout_seconds)
        result = BaselineResult()
        ids: list[str] = []
        for _ in range(self.n_epochs):
            for start in range(0, len(tasks), self.max_queue_length):
                requests = [
                    EnqueueRolloutRequest(input=task, mode=mode, resources_id=resources_id, config=limits)
                    for task, mode in tasks[start : start + self.max_queue_length]
                ]
                rollouts = await collect(store, requests, timeout_seconds=self.timeout_seconds, late=self.late_rollouts)
                for rollout in rollouts[: len(requests)]:
                    ids.append(rollout.rollout_id)
                    self._add(await evidence(store, rollout, note=True), result)
        data = {"rewards": result.rewards, "outcomes": result.outcomes, "seconds": result.seconds, "rollout_ids": ids}
        names = tasks_of([task for _ in range(self.n_epochs) for task, _ in tasks])
        await self.get_run_log().evaluation(0, "baseline", {**data, "tasks": names}, value=result.mean_reward)
        logger.info("%s", result)
        if result.mean_reward is None:  # a warning, not an error: a smoke test is there to show it
            logger.warning("no rollout has a reward: %s; the first error: %s", result, result.first_error or "none")
        return result

    def _add(self, record: Evidence, result: BaselineResult) -> None:
        """Log a rollout and add it to the result."""
        rollout, latest, spans, reward = record.rollout, record.latest, record.counted, record.reward
        seconds = (rollout.end_time or rollout.start_time) - rollout.start_time
        result.rewards.append(reward)
        result.seconds.append(seconds)
        outcome = (latest.outcome if latest else None) or rollout.status
        result.outcomes[outcome] = result.outcomes.get(outcome, 0) + 1
        if latest is not None and latest.error is not None and result.first_error is None:
            result.first_error = f"{latest.error.type}: {latest.error.message}"
        logger.info(
            "[Rollout %s] %s (%s) in %.2f s, reward %s", rollout.rollout_id, rollout.status, outcome, seconds, reward
        )
        for attempt in record.attempts:
            logger.info(
                "[Rollout %s | Attempt %s] number %d, %s, worker %s%s",
                *(rollout.rollout_id, attempt.attempt_id, attempt.sequence_id, attempt.status, attempt.worker_id),
                f", {attempt.error.type}: {attempt.error.message}" if attempt.error else "",
            )
        for span in spans if self.span_verbosity != "none" else ():
            shown: object = span.attributes if self.span_verbosity == "key_values" else sorted(span.attributes)
            span_seconds = (span.end_time or 0.0) - (span.start_time or 0.0)
            logger.info(
                "[Rollout %s | Attempt %s | Span %s] number %d, %s, %.3f s, %s",
                *(span.rollout_id, span.attempt_id, span.span_id, span.sequence_id, span.name, span_seconds, shown),
            )
        if model_calls(spans):  # an adapter needs at least one
            try:
                adapted: object = self.get_adapter().adapt(spans)
            except ValueError as error:  # an adapter that finds nothing to adapt is no reason to stop a smoke test
                adapted = f"nothing ({error})"
            logger.info("[Rollout %s] adapted: %s", rollout.rollout_id, adapted)
