"""`Evaluator` runs every task of a dataset without learning; `Trainer.evaluate` uses it."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from agentlightning.adapter.calls.calls import model_calls
from agentlightning.adapter.explain import ExplainedCall
from agentlightning.adapter.spans.rewards import final_dimensions
from agentlightning.algorithm.fast import FastAlgorithm
from agentlightning.algorithm.utils import running_llm_proxy
from agentlightning.base.field_help import explain_fields
from agentlightning.base.terminal import counted
from agentlightning.emitter.reward import PRIMARY, find_final_reward
from agentlightning.evaluation.paired import SequentialTest, Stopping, Verdict
from agentlightning.evaluation.records import record_of
from agentlightning.evaluation.result import SCORED, EvaluatedRollout, EvaluatedTask, EvaluationResult, digest_of
from agentlightning.evaluation.statistics import check_share
from agentlightning.evaluation.tasks import repeats_of, tasks_of
from agentlightning.training.rollouts import Evidence, Watcher, collect, evidence
from agentlightning.training.tasks import items_of, with_timeout
from agentlightning.types import Dataset, EnqueueRolloutRequest, Rollout

OnSample = Callable[[object, EvaluatedRollout], None]
"""A function of a task and its sample. With a strategy of several processes, it must be picklable."""
ROLLOUT_SECONDS = 3600.0
"""Time limit of a rollout, in seconds, if the Trainer's `rollout_config` has none."""
_READ_AT_ONCE = 32
"""Maximum number of rollouts whose spans are fetched concurrently."""


@explain_fields
@dataclass(frozen=True)
class SequentialStop:
    """Rule to end an evaluation early: `trainer.evaluate(..., stop_early=SequentialStop(threshold=0.8))`.

    Tasks run in a random order, in batches. After each batch the evaluation ends if the test shows that its mean reward
    is above or below the `threshold`, or better or worse than the `baseline` on the same tasks. A task without a reward
    does not count. A reward outside `reward_range` invalidates the test: then all tasks run, and the verdict is `no
    evidence`.

    Raises:
        ValueError: not exactly one of `baseline` and `threshold` is set, or a number is out of range.
    """

    baseline: EvaluationResult | None = None
    """The evaluation to compare with, of the same tasks in the same order."""
    threshold: float | None = None
    """The mean reward to compare with, inside `reward_range`."""
    significance: float = 0.05
    """Maximum probability of a verdict if there is no difference."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Minimum and maximum possible reward; a narrower range needs fewer tasks."""
    batch: int = 16
    """Number of tasks between two tests; should be at least the number of concurrent rollouts."""
    seed: int = 0
    """Seed of the order of the tasks."""

    def __post_init__(self) -> None:
        low, high = self.reward_range
        if (self.baseline is None) == (self.threshold is None):
            raise ValueError("SequentialStop requires either a baseline or a threshold, not both")
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(f"reward_range={self.reward_range} must be two finite numbers, the lower one first")
        if self.threshold is not None and not low < self.threshold < high:
            raise ValueError(f"threshold={self.threshold} must be inside reward_range={self.reward_range}")
        check_share("significance", self.significance)
        if self.batch < 1:
            raise ValueError(f"batch={self.batch} must be at least 1")

    def test(self) -> SequentialTest:
        """Return the test of the rewards, each minus the threshold or the baseline's reward of the same task."""
        low, high = self.reward_range
        if self.threshold is None:
            return SequentialTest(high - low, high - low)
        return SequentialTest(self.threshold - low, high - self.threshold)


def check_baseline(rule: object, tasks: Sequence[object]) -> None:
    """Check a `SequentialStop` before its evaluation begins.

    Raises:
        TypeError: it is not a `SequentialStop`.
        ValueError: its baseline has other tasks.
    """
    if not isinstance(rule, SequentialStop):
        raise TypeError(f"stop_early must be a SequentialStop; got {type(rule).__name__}")
    if rule.baseline is not None and list(map(digest_of, rule.baseline.tasks)) != tasks_of(tasks):
        raise ValueError(
            "stop_early compares task by task, so the baseline must have the same tasks in the same order; the "
            f"baseline has {counted(len(rule.baseline.tasks), 'task')}, and this evaluation has {len(tasks)}"
        )


class Evaluator(FastAlgorithm[EvaluationResult]):
    """Run the agent `n_samples` times on each task of `val_dataset` in mode `val`, with the initial resources.

    Returns an `EvaluationResult`, and records it in the run as the evaluation `evaluation`.

    Args:
        slices: (T,) the slices of each task.
        stop_early: rule to end the evaluation before all tasks have run.
        on_sample: called with a task and its sample when the sample has ended.
    """

    def __init__(
        self,
        n_samples: int = 1,
        slices: Sequence[tuple[str, ...]] | None = None,
        stop_early: SequentialStop | None = None,
        on_sample: OnSample | None = None,
    ) -> None:
        self.n_samples = n_samples
        self.slices = slices
        self.stop_early = stop_early
        self.on_sample = on_sample

    @override
    async def run(
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> EvaluationResult:
        async with running_llm_proxy(self):
            return await self._run_tasks(items_of(val_dataset))

    async def _run_tasks(self, tasks: list[Any]) -> EvaluationResult:
        start, store = time.monotonic(), self.get_store()
        resources_id = (await store.add_resources(self.get_initial_resources() or {})).resources_id
        stopping: Stopping | None = None
        if self.stop_early is None:
            by_place = await self._sample(tasks, range(len(tasks)), resources_id)
        else:
            by_place, stopping = await self._sample_until_sure(tasks, self.stop_early, resources_id)
        repeats = repeats_of(tasks)
        evaluated = tuple(replace(by_place[place], repeat=repeats[place]) for place in sorted(by_place))
        run_id = self.get_run_log().run_id or None
        result = EvaluationResult(evaluated, time.monotonic() - start, run_id, stopping=stopping)
        data = record_of(result, [task.digest for task in evaluated])
        await self.get_run_log().evaluation(0, "evaluation", data, value=result.mean_reward)
        return result

    async def _sample(self, tasks: Sequence[Any], places: Sequence[int], resources_id: str) -> dict[int, EvaluatedTask]:
        """Run the tasks at these positions and return them by position."""
        store, limits = self.get_store(), with_timeout(self.get_rollout_config(), ROLLOUT_SECONDS)
        requests = [
            EnqueueRolloutRequest(input=tasks[place], mode="val", resources_id=resources_id, config=limits)
            for place in places
            for _ in range(self.n_samples)
        ]
        seconds = limits.timeout_seconds or ROLLOUT_SECONDS
        attempts = limits.max_attempts + limits.infrastructure_retries
        watcher = None if self.on_sample is None else Watcher(on_ended=self._tell)
        limit = seconds * attempts * len(requests)
        rollouts = await collect(store, requests, timeout_seconds=limit, watcher=watcher)
        samples: list[EvaluatedRollout] = []
        for start in range(0, len(rollouts), _READ_AT_ONCE):
            reads = (evidence(store, rollout, note=True) for rollout in rollouts[start : start + _READ_AT_ONCE])
            samples += map(_evaluated, await asyncio.gather(*reads))
        inputs = [rollout.input for rollout in rollouts[:: self.n_samples]]
        by_place: dict[int, EvaluatedTask] = {}
        for number, (place, task, digest) in enumerate(zip(places, inputs, tasks_of(inputs), strict=True)):
            group = tuple(samples[number * self.n_samples : (number + 1) * self.n_samples])
            by_place[place] = EvaluatedTask(task, group, self.slices[place] if self.slices else (), digest)
        return by_place

    async def _tell(self, ended: Sequence[Rollout]) -> None:
        assert self.on_sample is not None
        for rollout in ended:
            self.on_sample(rollout.input, _evaluated(await evidence(self.get_store(), rollout)))

    async def _sample_until_sure(
        self, tasks: Sequence[Any], rule: SequentialStop, resources_id: str
    ) -> tuple[dict[int, EvaluatedTask], Stopping]:
        """Run the tasks in a random order until the verdict is certain."""
        places = list(range(len(tasks)))
        random.Random(rule.seed).shuffle(places)
        low, high = rule.reward_range
        baseline = None if rule.baseline is None else rule.baseline.rewards
        by_place, test, note = dict[int, EvaluatedTask](), rule.test(), ""
        verdict: Verdict = "no evidence"
        p_value = 1.0
        for start in range(0, len(places), rule.batch):
            batch = places[start : start + rule.batch]
            by_place |= await self._sample(tasks, batch, resources_id)
            changes: list[float] = []
            for place in batch:
                reward, other = by_place[place].reward, rule.threshold if baseline is None else baseline[place]
                outside = next((x for x in (reward, other) if x is not None and not low <= x <= high), None)
                if outside is not None:
                    note = f"no test: the reward {outside:g} is outside reward_range={rule.reward_range}"
                elif reward is not None and other is not None:
                    changes.append(reward - other)
            if note:
                verdict, p_value = "no evidence", 1.0
                continue
            verdict, p_value = test.add(changes, rule.significance)
            if verdict != "no evidence":
                break
        saved = len(places) - len(by_place)
        against = "baseline" if baseline is not None else f"threshold {rule.threshold:g}"
        return by_place, Stopping(verdict, p_value, len(by_place), saved, against, rule.reward_range, note)


def _evaluated(record: Evidence) -> EvaluatedRollout:
    latest, reward = record.latest, record.reward
    outcome = (latest.outcome if latest else None) or record.rollout.status
    seconds = 0.0 if latest is None else max(0.0, (latest.end_time or latest.start_time) - latest.start_time)
    failure = None
    if outcome not in SCORED or reward is None:
        unusable = outcome in SCORED and find_final_reward(record.counted) is not None  # such as one from elsewhere
        reason = "invalid_reward" if unusable else None if latest is None else latest.outcome_reason
        failure = latest.error.type if latest is not None and latest.error is not None else reason or outcome
    dimensions = final_dimensions(record.counted) if reward is not None else {}
    if list(dimensions) == [PRIMARY]:  # a plain number
        dimensions = {}
    calls = [ExplainedCall(number, call) for number, call in enumerate(model_calls(record.counted))]
    counts = [count for call in calls for count in (call.prompt_tokens, call.completion_tokens) if count is not None]
    tokens = sum(counts) if counts else None
    return EvaluatedRollout(record.rollout.rollout_id, outcome, reward, seconds, failure, dimensions, tokens)
