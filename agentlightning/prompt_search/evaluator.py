"""Runs candidate prompts on tasks: how each rollout ended, what each candidate earned, and how sure its mean is."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal, cast

from typing_extensions import TypedDict

from agentlightning.adapter.messages import TraceToMessages
from agentlightning.errors import NoScoredRolloutError
from agentlightning.evaluation.result import SCORED
from agentlightning.evaluation.statistics import mcnemar_exact, t_interval
from agentlightning.evaluation.tasks import tasks_of
from agentlightning.store.base import LightningStore
from agentlightning.store.rules.values import to_json
from agentlightning.terminal import cut
from agentlightning.training.rollouts import Evidence, collect, evidence
from agentlightning.training.tasks import with_timeout
from agentlightning.types import (
    EnqueueRolloutRequest,
    NamedResources,
    PromptTemplate,
    Rollout,
    RolloutConfig,
    RolloutMode,
)

logger = logging.getLogger(__name__)

Templates = Mapping[str, PromptTemplate]
"""Prompt templates by the names of their resources."""
MissingPolicy = Literal["retry", "skip", "zero"]
"""Treatment of a task whose rollout earned nothing, through a fault or because it was late. `retry` runs it once more
and then excludes it from the mean, `skip` excludes it at once, `zero` counts it as 0."""
MOST_WITH_MESSAGES = 1000
"""Results of training tasks that are kept with their messages; of older ones the score is kept."""
_READ_AT_ONCE = 32
"""Rollouts whose spans are fetched at the same time."""
_TEXT = 2_000
"""Characters of one message or one value of a span."""
_MESSAGES, _SPANS, _ITEMS, _DEEPEST = 24, 40, 200, 6
"""Most messages of a conversation, spans of a rollout, items of a list, and levels; the first and last are kept."""
_SPAN_FIELDS = {"name", "attributes", "status", "start_time", "end_time"}
_Z = NormalDist().inv_cdf(0.975)


class NoCandidateError(NoScoredRolloutError, ValueError):
    """No version could be judged: none of their rollouts earned anything."""


# --- results ---------------------------------------------------------------------------------------------------------


class RolloutResult(TypedDict):
    """How a rollout ended, as JSON data. Long texts are cut."""

    rollout_id: str
    task: Any
    """The input of the rollout."""
    status: str
    final_reward: float | None
    """None where it earned nothing: a fault is not a low reward."""
    failure: str | None
    """Why it earned nothing, or the agent's own fault; None without either."""
    messages: list[Any]
    """The conversations of the latest attempt, each `{"messages": [...], "tools": [...]}`."""
    spans: list[dict[str, Any]]
    """Of the latest attempt: name, attributes, status and times."""


async def read_results(
    store: LightningStore, rollouts: Sequence[Rollout], adapter: TraceToMessages
) -> list[RolloutResult]:
    """Return the results of ended rollouts, in their order."""
    results = list[RolloutResult]()
    for start in range(0, len(rollouts), _READ_AT_ONCE):
        batch = rollouts[start : start + _READ_AT_ONCE]
        pieces = await asyncio.gather(*(evidence(store, rollout, note=True) for rollout in batch))
        results += [_result_of(each, adapter) for each in pieces]
    return results


def _result_of(ended: Evidence, adapter: TraceToMessages) -> RolloutResult:
    latest, reward, failure = ended.latest, ended.reward, None
    outcome = (latest.outcome if latest else None) or ended.rollout.status
    if latest is not None and latest.error is not None:
        failure = cut(f"{latest.error.type}: {latest.error.message}", _TEXT)
    elif outcome not in SCORED or reward is None:
        failure = (latest.outcome_reason if latest else None) or ("no reward" if outcome == "unscored" else outcome)
    return RolloutResult(
        rollout_id=ended.rollout.rollout_id,
        task=_short(to_json(ended.rollout.input)),
        status=ended.rollout.status,
        final_reward=reward,
        failure=failure,
        messages=_conversations(ended, adapter),
        spans=[_short(span.model_dump(mode="json", include=_SPAN_FIELDS)) for span in _ends(ended.counted, _SPANS)],
    )


def _conversations(ended: Evidence, adapter: TraceToMessages) -> list[Any]:
    try:
        calls = adapter.adapt(ended.counted)
    except ValueError as error:  # nothing that the adapter can read
        logger.debug("rollout %s shows no messages: %s", ended.rollout.rollout_id, error)
        return []
    conversations = list[Any]()
    for number, call in enumerate(calls):
        messages = call["messages"]
        if not any(later["messages"][: len(messages)] == messages for later in calls[number + 1 :]):
            conversations.append({**call, "messages": _short(_ends(messages, _MESSAGES))})
    return _ends(conversations, _MESSAGES)


def _ends(items: Sequence[Any], most: int) -> list[Any]:
    return list(items) if len(items) <= most else [*items[: most // 2], *items[-(most - most // 2) :]]


def _short(value: Any, depth: int = _DEEPEST) -> Any:
    """Return JSON data with its long texts cut, and what lies too deep as a text."""
    if isinstance(value, str):
        return cut(value, _TEXT)
    if isinstance(value, (dict, list)) and depth <= 0:
        return cut(json.dumps(value), _TEXT)
    if isinstance(value, dict):
        return {key: _short(item, depth - 1) for key, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list):
        return [_short(item, depth - 1) for item in _ends(cast("list[Any]", value), _ITEMS)]
    return value


# --- scores ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a candidate on tasks."""

    mean: float | None
    """Over the tasks that count; None if none does."""
    low: float
    """Lower bound of the 95 % interval of the mean, see `interval`."""
    high: float
    tasks: int
    scored: int
    """Tasks that earned something; the others failed."""

    @property
    def coverage(self) -> float:
        """Share of the tasks that earned something."""
        return self.scored / self.tasks if self.tasks else 0.0


def rewards_of(results: Sequence[RolloutResult]) -> list[float | None]:
    """Return the rewards of results."""
    return [result["final_reward"] for result in results]


def score_of(rewards: Sequence[float | None], missing: MissingPolicy = "retry") -> Score:
    """Return the score of rewards, one per task; None where it earned nothing."""
    earned = [reward for reward in rewards if reward is not None]
    counted = earned + [0.0] * (len(rewards) - len(earned) if missing == "zero" else 0)
    return Score(*interval(counted), len(rewards), len(earned))


def interval(rewards: Sequence[float]) -> tuple[float | None, float, float]:
    """Return mean and 95 % interval; None and infinite bounds for no rewards.

    Within 0 and 1 it is Wilson's with the mean as the share of successes: no rewards of that mean vary more than those
    of 0 and 1, so it is never too narrow, also where a few are equal by chance. Else it is Student's t.
    """
    if not rewards:
        return None, -math.inf, math.inf
    if not all(0.0 <= reward <= 1.0 for reward in rewards):
        return t_interval(rewards)
    count, mean = len(rewards), math.fsum(rewards) / len(rewards)
    shrink = 1.0 + _Z * _Z / count
    centre = (mean + _Z * _Z / (2 * count)) / shrink
    half = _Z / shrink * math.sqrt(mean * (1.0 - mean) / count + _Z * _Z / (4 * count * count))
    return mean, max(0.0, centre - half), min(1.0, centre + half)


def sign_test(before: Sequence[float | None], after: Sequence[float | None]) -> float:
    """Return the two-sided p-value of the exact sign test on the tasks that earned something in both."""
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if old is not None and new is not None]
    return mcnemar_exact(sum(new > old for old, new in pairs), sum(new < old for old, new in pairs))


# --- rollouts of candidates ------------------------------------------------------------------------------------------

_Key = tuple[str, RolloutMode, str]
"""Digest of the prompts, mode, digest of the task."""


def digest_of(templates: Templates) -> str:
    """Return what equal sets of prompts have in common."""
    texts = {name: [template.engine, template.template] for name, template in sorted(templates.items())}
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:32]


@dataclass
class _Job:
    """A candidate on some tasks, and the future of its results."""

    version: str
    templates: Templates
    mode: RolloutMode
    tasks: list[Any]
    keys: list[_Key]
    done: asyncio.Future[list[RolloutResult]]


class CandidateEvaluator:
    """Runs candidates on tasks. Belongs to the event loop of the algorithm.

    Calls made at the same time are one round: enqueued in one call to the store, and each answered when its own tasks
    have ended. Each candidate is published with everything else of `resources`, under `<name>-<run>-<version>`. Scores
    are kept per candidate, mode and task: the same does not run twice. Rollouts that are late, or that nobody waits for
    any more, are cancelled.

    Args:
        read: returns the results of ended rollouts, in their order.
        name: of the algorithm, in the ids of the resources.
        timeout_seconds: of the rollouts of one candidate; those of several in one round have the sum.
        config: of each rollout; without a time limit of its own an attempt has `timeout_seconds`.
        missing: with `retry`, a task that earned nothing runs once more.
        seconds_left: rollouts that are late by then are cancelled too.
    """

    def __init__(
        self,
        store: LightningStore,
        read: Callable[[Sequence[Rollout]], Awaitable[Sequence[RolloutResult]]],
        *,
        name: str,
        run: str,
        resources: NamedResources,
        timeout_seconds: float,
        config: RolloutConfig | None = None,
        missing: MissingPolicy = "retry",
        seconds_left: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._store, self._read, self._prefix, self._resources = store, read, f"{name}-{run}", resources
        self._timeout, self._config = timeout_seconds, with_timeout(config, timeout_seconds)
        self._retries, self._seconds_left = missing == "retry", seconds_left
        self._results: dict[_Key, RolloutResult] = {}
        self._published: dict[str, str] = {}
        self._jobs: list[_Job] = []
        self._round: asyncio.Task[None] | None = None
        """The round that takes in further jobs."""
        self.rollouts = 0
        """Number of rollouts that were enqueued."""

    def resources_with(self, templates: Templates) -> NamedResources:
        """Return all resources, with these prompts in the place of those of their names."""
        return {**self._resources, **templates}

    def known(self, templates: Templates, mode: RolloutMode) -> list[RolloutResult]:
        """Return the last result of each task that a candidate has run on in a mode."""
        digest = digest_of(templates)
        return [result for key, result in self._results.items() if key[:2] == (digest, mode)]

    async def evaluate(
        self, version: str, templates: Templates, tasks: Sequence[Any], mode: RolloutMode
    ) -> list[RolloutResult]:
        """Return the results of a candidate on each task, in order."""
        if not tasks:
            return []
        digest = digest_of(templates)
        keys: list[_Key] = [(digest, mode, task) for task in tasks_of(tasks)]
        job = _Job(version, templates, mode, list(tasks), keys, asyncio.get_running_loop().create_future())
        if self._round is None:
            self._jobs = []
            self._round = asyncio.create_task(self._run_round(self._jobs), name="evaluate-prompts")
        self._jobs.append(job)
        jobs, running = self._jobs, self._round
        try:
            return await job.done
        finally:
            if all(other.done.done() for other in jobs) and not running.done():
                if self._round is running:  # it had not begun, and will not take in later jobs
                    self._round = None
                running.cancel()
                await asyncio.wait([running])

    async def _run_round(self, jobs: list[_Job]) -> None:
        await asyncio.sleep(0)  # those that were started together have been added by then
        self._round = None
        try:
            results = await self._results_of(jobs)
        except Exception as error:  # each caller raises it
            for job in jobs:
                if not job.done.done():
                    job.done.set_exception(error)
        except BaseException:
            for job in jobs:
                job.done.cancel()
            raise
        else:
            _answer([job for job in jobs if not job.done.done()], results)

    async def _results_of(self, jobs: Sequence[_Job]) -> dict[_Key, RolloutResult]:
        results, wanted = dict[_Key, RolloutResult](), dict[_Key, tuple[_Job, Any]]()
        for job in jobs:
            for key, task in zip(job.keys, job.tasks, strict=True):
                known = self._results.get(key)
                if known is not None and known["final_reward"] is not None:  # a fault may be none the next time
                    results[key] = known
                else:
                    wanted.setdefault(key, (job, task))
        if not wanted:
            return results

        def answer_early(fresh: Mapping[_Key, RolloutResult]) -> None:
            results.update(fresh)
            final = {key for key, r in results.items() if r["final_reward"] is not None or not self._retries}
            still_open = [job for job in jobs if not job.done.done()]
            ready = [job for job in still_open if final.issuperset(job.keys)]
            if len(ready) < len(still_open):  # the last ones are answered with the round
                _answer(ready, results)

        seconds = self._timeout * len(jobs)
        fresh = await self._run_tasks(wanted, seconds, answer_early)
        failed = {key: wanted[key] for key, result in fresh.items() if result["final_reward"] is None}
        if failed and self._retries and self._seconds_left() > 0:
            logger.info("%d of %d rollouts earned nothing and are played once more", len(failed), len(wanted))
            results |= await self._run_tasks(failed, seconds)
        for key in [key for key in self._results if key[1] != "val"][:-MOST_WITH_MESSAGES]:
            self._results[key] = _without_messages(self._results[key])
        return results

    async def _run_tasks(
        self,
        wanted: Mapping[_Key, tuple[_Job, Any]],
        seconds: float,
        on_results: Callable[[Mapping[_Key, RolloutResult]], None] = lambda _: None,
    ) -> dict[_Key, RolloutResult]:
        """Run tasks, enqueued at once, and return their results; `on_results` takes those that have ended meanwhile."""
        requests = [
            EnqueueRolloutRequest(
                input=task,
                mode=job.mode,
                resources_id=await self._publish(job),
                config=self._config,
                metadata={"prompt_version": job.version, "task": key[2]},
            )
            for key, (job, task) in wanted.items()
        ]
        self.rollouts += len(requests)
        key_of = {(self._published[key[0]], *key[1:]): key for key in wanted}
        results: dict[_Key, RolloutResult] = {}

        async def read_ended(ended: Sequence[Rollout]) -> None:
            keys = [key_of[r.resources_id or "", r.mode or "train", str((r.metadata or {})["task"])] for r in ended]
            fresh = dict(zip(keys, await self._read(ended), strict=True))
            for key, result in fresh.items():
                self._results[key] = _without_messages(result) if key[1] == "val" else result
            results.update(fresh)
            on_results(fresh)

        limit = max(0.0, min(seconds, self._seconds_left()))
        rollouts = await collect(self._store, requests, timeout_seconds=limit, on_ended=read_ended)
        if late := [rollout for key, rollout in zip(wanted, rollouts, strict=True) if key not in results]:
            await read_ended(late)
        return {key: results[key] for key in wanted}

    async def _publish(self, job: _Job) -> str:
        digest = job.keys[0][0]
        if digest not in self._published:
            resources_id = f"{self._prefix}-{job.version}"
            await self._store.update_resources(resources_id, self.resources_with(job.templates))
            self._published[digest] = resources_id
        return self._published[digest]


def _answer(jobs: Sequence[_Job], results: Mapping[_Key, RolloutResult]) -> None:
    for job in jobs:
        job.done.set_result([results[key] for key in job.keys])


def _without_messages(result: RolloutResult) -> RolloutResult:
    return {**result, "messages": [], "spans": []}
