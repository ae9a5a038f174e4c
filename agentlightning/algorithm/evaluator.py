"""`Evaluator` samples every task of a dataset and learns nothing; `Trainer.evaluate` runs it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from agentlightning.adapter.calls.calls import model_calls
from agentlightning.adapter.explain import ExplainedCall
from agentlightning.adapter.spans.rewards import final_dimensions
from agentlightning.algorithm.fast import FastAlgorithm
from agentlightning.algorithm.utils import with_llm_proxy
from agentlightning.emitter.reward import PRIMARY, find_final_reward
from agentlightning.errors import BadRequestError
from agentlightning.evaluation.betting import Stopping, judge
from agentlightning.evaluation.records import record_of
from agentlightning.evaluation.result import SCORED, EvaluatedRollout, EvaluatedTask, EvaluationResult
from agentlightning.evaluation.sequential import SequentialStop
from agentlightning.evaluation.statistics import Verdict
from agentlightning.evaluation.tasks import repeats_of, tasks_of
from agentlightning.training.rollouts import Evidence, collect, evidence
from agentlightning.training.tasks import with_timeout
from agentlightning.types import Dataset, EnqueueRolloutRequest, Rollout

if TYPE_CHECKING:
    from agentlightning.llm_proxy import LLMProxy

ROLLOUT_SECONDS = 3600.0
"""Time limit of a rollout where the Trainer's `rollout_config` has none."""
_READ_AT_ONCE = 32
"""Rollouts whose spans are fetched at the same time."""


class Evaluator(FastAlgorithm):
    """Runs the agent on each task of `val_dataset` `n_samples` times in mode `val`, with the initial resources.

    Returns an `EvaluationResult`, and records it in the run as the evaluation `evaluation`.

    Args:
        slices: (T,) the slices of each task.
        stop_early: When to leave out the rest of the tasks.
    """

    def __init__(
        self,
        n_samples: int = 1,
        slices: Sequence[tuple[str, ...]] | None = None,
        stop_early: SequentialStop | None = None,
    ) -> None:
        self.n_samples = n_samples
        self.slices = slices
        self.stop_early = stop_early

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
        stopping: Stopping | None = None
        if self.stop_early is None:
            tasks_by_place = await self._sampled(tasks, range(len(tasks)), resources_id)
        else:
            tasks_by_place, stopping = await self._sampled_in_turn(tasks, self.stop_early, resources_id)
        run_id = self.get_run_log().run_id or None
        repeats = repeats_of(tasks)
        in_order = tuple(replace(tasks_by_place[place], repeat=repeats[place]) for place in sorted(tasks_by_place))
        result = EvaluationResult(in_order, time.monotonic() - began, run_id, stopping=stopping)
        data = record_of(result, [task.digest for task in in_order])
        await self.get_run_log().evaluation(0, "evaluation", data, value=result.mean_reward)
        return result

    async def _sampled(
        self, tasks: Sequence[Any], places: Sequence[int], resources_id: str
    ) -> dict[int, EvaluatedTask]:
        """Run the tasks at these places and return them by place."""
        limits = with_timeout(self.get_rollout_config(), ROLLOUT_SECONDS)
        requests = [
            EnqueueRolloutRequest(input=tasks[place], mode="val", resources_id=resources_id, config=limits)
            for place in places
            for _ in range(self.n_samples)
        ]
        seconds = limits.timeout_seconds or ROLLOUT_SECONDS
        attempts = limits.max_attempts + limits.infrastructure_retries
        rollouts = await collect(self.get_store(), requests, timeout_seconds=seconds * attempts * len(requests))
        samples = await self._read(rollouts)
        inputs = [rollout.input for rollout in rollouts[:: self.n_samples]]
        by_place: dict[int, EvaluatedTask] = {}
        for number, (place, task, digest) in enumerate(zip(places, inputs, tasks_of(inputs), strict=True)):
            group = tuple(samples[number * self.n_samples : (number + 1) * self.n_samples])
            by_place[place] = EvaluatedTask(task, group, self.slices[place] if self.slices else (), digest)
        return by_place

    async def _sampled_in_turn(
        self, tasks: Sequence[Any], rule: SequentialStop, resources_id: str
    ) -> tuple[dict[int, EvaluatedTask], Stopping]:
        """Run the tasks in a random order until the verdict is sure."""
        places = list(range(len(tasks)))
        random.Random(rule.seed).shuffle(places)
        low, high = rule.reward_range
        base = None if rule.baseline is None else rule.baseline.rewards
        against = "baseline" if base is not None else f"threshold {rule.threshold:g}"
        by_place, bets, note = dict[int, EvaluatedTask](), rule.bets(), ""
        verdict: Verdict = "no evidence"
        p_value = 1.0
        for start in range(0, len(places), rule.batch):
            batch = places[start : start + rule.batch]
            fresh = await self._sampled(tasks, batch, resources_id)
            by_place |= fresh
            changes = list[float]()
            for place in batch:
                reward, other = fresh[place].reward, rule.threshold if base is None else base[place]
                outside = next((x for x in (reward, other) if x is not None and not low <= x <= high), None)
                if outside is not None:
                    note = f"no test: the reward {outside:g} is outside of reward_range={rule.reward_range}"
                elif reward is not None and other is not None:
                    changes.append(reward - other)
            if note:
                verdict, p_value = "no evidence", 1.0
                continue
            verdict, p_value = judge(bets, changes, rule.significance)
            if verdict != "no evidence":
                break
        saved = len(places) - len(by_place)
        return by_place, Stopping(verdict, p_value, len(by_place), saved, against, rule.reward_range, note)

    async def _read(self, rollouts: Sequence[Rollout]) -> list[EvaluatedRollout]:
        store, read = self.get_store(), list[EvaluatedRollout]()
        for start in range(0, len(rollouts), _READ_AT_ONCE):
            records = await asyncio.gather(
                *(evidence(store, r, note=True) for r in rollouts[start : start + _READ_AT_ONCE])
            )
            read.extend(map(_sample, records))
        return read


def _sample(record: Evidence) -> EvaluatedRollout:
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
    tokens = _tokens(record)
    return EvaluatedRollout(record.rollout.rollout_id, outcome, reward, seconds, failure, dimensions, tokens)


def _tokens(record: Evidence) -> int | None:
    calls = [ExplainedCall(number, call, None, None, None) for number, call in enumerate(model_calls(record.counted))]
    counts = [count for call in calls for count in (call.prompt_tokens, call.completion_tokens) if count is not None]
    return sum(counts) if counts else None
