"""Comparison of two runs, two steps of a run, or two versions of resources on the same tasks, with the paired test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import fmean
from typing import Any

from agentlightning.base.terminal import counted
from agentlightning.dashboard.reading import known_run
from agentlightning.dashboard.values import Comparison, TaskPair
from agentlightning.errors import BadRequestError, NotFoundError
from agentlightning.evaluation.paired import compare_rewards
from agentlightning.evaluation.records import RecordedEvaluation, last_evaluations, result_of, same_tasks
from agentlightning.evaluation.result import (
    EvaluatedRollout,
    EvaluatedTask,
    EvaluationResult,
    sequential_range,
    shared_tasks,
)
from agentlightning.evaluation.tasks import tasks_of
from agentlightning.store.base import LightningStore
from agentlightning.store.cursors import pages_of
from agentlightning.store.summaries.facts import input_text, preview_of
from agentlightning.types import AttemptedRollout, RunRecord
from agentlightning.utils.rewards import as_reward

MOST_ROLLOUTS = 20_000
"""Maximum number of rollouts of one version of resources."""
_PAGE = 500
FORMS = "RUN, RUN:STEP, RUN:STEP:NAME (an evaluation of that name), or resources:ID@VERSION"


@dataclass(frozen=True)
class Side:
    """One side of a comparison, as requested."""

    text: str
    run_id: str | None = None
    step: int | None = None
    name: str | None = None
    resources_id: str | None = None
    version: int | None = None


def parse_side(text: str) -> Side:
    """Read one side of a comparison.

    Raises:
        BadRequestError: The text has none of the forms.
    """
    if text.startswith("resources:"):
        name, at, version = text.removeprefix("resources:").rpartition("@")
        if at and name and version.isascii() and version.isdigit():
            return Side(text, resources_id=name, version=int(version))
    else:
        run_id, _, rest = text.partition(":")
        step, _, name = rest.partition(":")
        if run_id and (not step or (step.isascii() and step.isdigit())):
            return Side(text, run_id, int(step) if step else None, name or None)
    raise BadRequestError(f"{text[:100]!r} cannot be compared. Expected {FORMS}")


async def compare(store: LightningStore, before: str, after: str, *, limit: int = 100, offset: int = 0) -> Comparison:
    """Compare two sides by task. `pairs` is a page of the tasks, gained and lost tasks first.

    Raises:
        BadRequestError: A side has none of the forms, or the sides have no task in common.
        NotFoundError: A run, an evaluation or a version is not in the store.
    """
    sides = parse_side(before), parse_side(after)
    (first, one), (second, other) = await _results(store, *sides)
    pairs = [pair for pair in shared_tasks(one, other) if None not in (pair[0].reward, pair[1].reward)]
    if not pairs:
        raise BadRequestError(
            f"{first} and {second} have no task in common with a reward on both sides "
            f"({len(one.tasks)} and {counted(len(other.tasks), 'task')})"
        )
    mine, its = [pair[0].reward or 0.0 for pair in pairs], [pair[1].reward or 0.0 for pair in pairs]
    result = compare_rewards(mine, its, stopped_in=sequential_range(one, other))
    rows = sorted(map(_pair, pairs), key=lambda pair: (pair.after == pair.before, pair.before - pair.after))
    return Comparison(
        before=first,
        after=second,
        tasks=len(pairs),
        gained=result.gained,
        lost=result.lost,
        unchanged=len(pairs) - result.gained - result.lost,
        before_mean=fmean(mine),
        after_mean=fmean(its),
        difference=fmean(its) - fmean(mine),
        interval=None if (each := result.difference) is None or each.high == inf else (each.low, each.high),
        p_value=result.p_value,
        test=result.method,
        verdict=result.verdict,
        pairs=await _with_inputs(store, rows[offset : offset + limit]),
        total=len(rows),
    )


async def _results(
    store: LightningStore, before: Side, after: Side
) -> tuple[tuple[str, EvaluationResult], tuple[str, EvaluationResult]]:
    """Return the description of each side, and its rewards by task."""
    if before.run_id is not None and after.run_id is not None and before.step is None and after.step is None:
        records = [await _evaluations(store, side) for side in (before, after)]
        pair = same_tasks(*records, runs=(before.run_id, after.run_id))
        return _named(before, pair[0]), _named(after, pair[1])
    candidates = [await _candidates(store, side) for side in (before, after)]
    names = [name for name in candidates[0] if name in candidates[1]] or [None]
    return _chosen(before, candidates[0], names[0]), _chosen(after, candidates[1], names[0])


async def _candidates(store: LightningStore, side: Side) -> dict[str, RecordedEvaluation]:
    """Return the evaluations that a side may refer to, by name. A version of resources has no name."""
    if side.resources_id is not None:
        return {"": RecordedEvaluation("", 0, await _of_version(store, side))}
    records = await _evaluations(store, side)
    if side.step is None:
        own = [record for record in records if record.name == side.name]  # one version of a prompt, or all steps
        candidates = {each.family: each for each in last_evaluations(records, side.run_id or "")}
        if side.name is not None and side.name not in candidates:
            candidates = {each.name: each for each in last_evaluations(own, side.run_id or "")}
    else:
        candidates: dict[str, RecordedEvaluation] = {}
        for record in (record for record in records if record.step == side.step):
            result = result_of(record.data, side.run_id)
            if result is not None and result.tasks:
                candidates[record.name] = RecordedEvaluation(record.name, record.step, result)
    if side.name is not None:
        candidates = {name: each for name, each in candidates.items() if name == side.name}
    if not candidates:
        steps = sorted({record.step for record in await _evaluations(store, replace(side, step=None))})
        label = f" {side.name!r}" if side.name else ""
        where = "" if side.step is None else f" at step {side.step}"
        raise NotFoundError(
            f"run {side.run_id} has no evaluation{label} with a reward per task{where}. Steps with evaluations: "
            f"{', '.join(map(str, steps[:20])) or 'none'}"
        )
    return candidates


def _chosen(side: Side, candidates: dict[str, RecordedEvaluation], name: str | None) -> tuple[str, EvaluationResult]:
    if side.resources_id is not None:
        return f"{side.resources_id} version {side.version}", candidates[""].result
    return _named(side, candidates[name] if name is not None else next(iter(candidates.values())))


def _named(side: Side, evaluation: RecordedEvaluation) -> tuple[str, EvaluationResult]:
    return f"{side.run_id}, step {evaluation.step}, {evaluation.name}", evaluation.result


async def _evaluations(store: LightningStore, side: Side) -> Sequence[RunRecord]:
    run = await known_run(store, side.run_id or "")
    of_step: dict[str, Any] = {"run_id": run.run_id, "step_from": side.step, "step_to": side.step}
    pages = pages_of(store.query_run_records, kind_in=["evaluation"], **of_step, limit=_PAGE)
    return [record async for page in pages for record in page]


async def _of_version(store: LightningStore, side: Side) -> EvaluationResult:
    """Return the rewards of all rollouts that used a version of resources, by task."""
    if await store.get_resources_by_id(side.resources_id or "", side.version) is None:
        raise NotFoundError(f"the store has no version {side.version} of the resources {side.resources_id!r}")
    summaries = await rollouts_of_version(store, side.resources_id or "", side.version or 0)
    by_task: dict[str, list[EvaluatedRollout]] = {}
    for rollout, reward in summaries:
        if reward is not None:
            seconds = (rollout.end_time or rollout.start_time) - rollout.start_time
            sample = EvaluatedRollout(rollout.rollout_id, rollout.attempt.outcome or rollout.status, reward, seconds)
            by_task.setdefault(tasks_of([rollout.input])[0], []).append(sample)
    tasks = tuple(EvaluatedTask(digest, tuple(rollouts), digest=digest) for digest, rollouts in by_task.items())
    return EvaluationResult(tasks=tasks)


async def rollouts_of_version(
    store: LightningStore, resources_id: str, version: int
) -> list[tuple[AttemptedRollout, float | None]]:
    """Return the ended rollouts that used a version, newest first, with their rewards; at most `MOST_ROLLOUTS`."""
    from agentlightning.types import RolloutFilter

    filters = RolloutFilter(resources_id=resources_id, resources_version=version, has_reward=True)
    pairs: list[tuple[AttemptedRollout, float | None]] = []
    cursor: str | None = None
    while len(pairs) < MOST_ROLLOUTS:
        page = await store.query_rollout_summaries(filter=filters, limit=1000, cursor=cursor)
        rewards = {each.rollout_id: as_reward(each.reward) for each in page.items}
        if not rewards:
            break
        rollouts = await store.query_rollouts(rollout_id_in=list(rewards))
        pairs += [(each, rewards[each.rollout_id]) for each in rollouts if isinstance(each, AttemptedRollout)]
        if (cursor := page.cursor) is None:
            break
    return pairs


async def _with_inputs(store: LightningStore, pairs: Sequence[TaskPair]) -> list[TaskPair]:
    """Return the pairs with the beginnings of their tasks' inputs."""
    ids = [rollout_id for pair in pairs if (rollout_id := pair.after_rollout_id or pair.before_rollout_id)]
    rollouts = await store.query_rollouts(rollout_id_in=ids) if ids else ()
    previews = {each.rollout_id: preview_of(input_text(each.input)) for each in rollouts}
    names = (previews.get(pair.after_rollout_id or pair.before_rollout_id or "", "") for pair in pairs)
    return [pair.model_copy(update={"input_preview": name}) for pair, name in zip(pairs, names, strict=True)]


def _pair(pair: tuple[EvaluatedTask, EvaluatedTask]) -> TaskPair:
    early, late = pair
    return TaskPair(
        task=early.digest or str(early.input)[:200],
        input_preview="",
        before_rollout_id=_rollout_of(early),
        after_rollout_id=_rollout_of(late),
        before=early.reward or 0.0,
        after=late.reward or 0.0,
    )


def _rollout_of(task: EvaluatedTask) -> str | None:
    return next((rollout.rollout_id for rollout in task.rollouts if rollout.rollout_id), None)
