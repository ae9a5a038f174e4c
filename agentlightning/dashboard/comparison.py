"""The same tasks on two sides: two runs, two steps of a run, or two versions of resources, with the paired test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

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
"""Of one version of resources."""
_PAGE = 500
FORMS = "RUN, RUN:STEP, RUN:STEP:NAME (an evaluation of that name), or resources:ID@VERSION"


@dataclass(frozen=True)
class Side:
    """One side as it was asked for."""

    text: str
    run_id: str | None = None
    step: int | None = None
    name: str | None = None
    resources_id: str | None = None
    version: int | None = None


def parse_side(text: str) -> Side:
    """Read one side of a comparison.

    Raises:
        BadRequestError: it is in none of the forms.
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
    raise BadRequestError(f"{text[:100]!r} names no side of a comparison; expected {FORMS}")


async def compare(store: LightningStore, before: str, after: str, *, limit: int = 100, offset: int = 0) -> Comparison:
    """Compare two sides task by task; `pairs` is a page of the tasks, gained and lost first.

    Raises:
        BadRequestError: a side is in none of the forms, or the two have no task in common.
        NotFoundError: a run, an evaluation or a version is not in the store.
    """
    sides = parse_side(before), parse_side(after)
    (first, one), (second, other) = await _results(store, *sides)
    pairs = [pair for pair in shared_tasks(one, other) if None not in (pair[0].reward, pair[1].reward)]
    if not pairs:
        raise BadRequestError(
            f"{first} and {second} have no task in common that both have a reward for "
            f"({len(one.tasks)} and {len(other.tasks)} tasks)"
        )
    mine, its = [pair[0].reward or 0.0 for pair in pairs], [pair[1].reward or 0.0 for pair in pairs]
    found = compare_rewards(mine, its, stopped_in=sequential_range(one, other))
    told = sorted(map(_pair, pairs), key=lambda pair: (pair.after == pair.before, pair.before - pair.after))
    return Comparison(
        before=first,
        after=second,
        tasks=len(pairs),
        gained=found.gained,
        lost=found.lost,
        unchanged=len(pairs) - found.gained - found.lost,
        before_mean=fmean(mine),
        after_mean=fmean(its),
        difference=fmean(its) - fmean(mine),
        interval=None if found.difference is None else (found.difference.low, found.difference.high),
        p_value=found.p_value,
        test=found.method,
        verdict=found.verdict,
        pairs=await _with_inputs(store, told[offset : offset + limit]),
        total=len(told),
    )


async def _results(
    store: LightningStore, before: Side, after: Side
) -> tuple[tuple[str, EvaluationResult], tuple[str, EvaluationResult]]:
    """Return each side in words, and its rewards by task."""
    if before.run_id is not None and after.run_id is not None and before.step is None and after.step is None:
        records = [await _evaluations(store, side) for side in (before, after)]
        pair = same_tasks(*records, runs=(before.run_id, after.run_id))
        return _named(before, pair[0]), _named(after, pair[1])
    found = [await _candidates(store, side) for side in (before, after)]
    names = [name for name in found[0] if name in found[1]] or [None]
    return _chosen(before, found[0], names[0]), _chosen(after, found[1], names[0])


async def _candidates(store: LightningStore, side: Side) -> dict[str, RecordedEvaluation]:
    """Return the evaluations that a side may mean, by name; a version of resources is one without a name."""
    if side.resources_id is not None:
        return {"": RecordedEvaluation("", 0, await _of_version(store, side))}
    records = await _evaluations(store, side)
    if side.step is None:
        own = [record for record in records if record.name == side.name]  # one version of a prompt, or all steps
        found = {each.family: each for each in last_evaluations(records, side.run_id or "")}
        if side.name is not None and side.name not in found:
            found = {each.name: each for each in last_evaluations(own, side.run_id or "")}
    else:
        found: dict[str, RecordedEvaluation] = {}
        for record in (record for record in records if record.step == side.step):
            result = result_of(record.data, side.run_id)
            if result is not None and result.tasks:
                found[record.name] = RecordedEvaluation(record.name, record.step, result)
    if side.name is not None:
        found = {name: each for name, each in found.items() if name == side.name}
    if not found:
        steps = sorted({record.step for record in await _evaluations(store, replace(side, step=None))})
        wanted = f" {side.name!r}" if side.name else ""
        where = "" if side.step is None else f" at step {side.step}"
        raise NotFoundError(
            f"run {side.run_id} has no evaluation{wanted} with rewards by task{where}; it has evaluations at the steps "
            f"{', '.join(map(str, steps[:20])) or 'none'}"
        )
    return found


def _chosen(side: Side, found: dict[str, RecordedEvaluation], name: str | None) -> tuple[str, EvaluationResult]:
    if side.resources_id is not None:
        return f"{side.resources_id} version {side.version}", found[""].result
    return _named(side, found[name] if name is not None else next(iter(found.values())))


def _named(side: Side, found: RecordedEvaluation) -> tuple[str, EvaluationResult]:
    return f"{side.run_id}, step {found.step}, {found.name}", found.result


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
            told = EvaluatedRollout(rollout.rollout_id, rollout.attempt.outcome or rollout.status, reward, seconds)
            by_task.setdefault(tasks_of([rollout.input])[0], []).append(told)
    tasks = tuple(EvaluatedTask(digest, tuple(told), digest=digest) for digest, told in by_task.items())
    return EvaluationResult(tasks=tasks)


async def rollouts_of_version(
    store: LightningStore, resources_id: str, version: int
) -> list[tuple[AttemptedRollout, float | None]]:
    """Return the ended rollouts that used a version, the newest first, each with its reward; so many at most."""
    from agentlightning.types import RolloutFilter

    chosen = RolloutFilter(resources_id=resources_id, resources_version=version, has_reward=True)
    found: list[tuple[AttemptedRollout, float | None]] = []
    cursor: str | None = None
    while len(found) < MOST_ROLLOUTS:
        page = await store.query_rollout_summaries(filter=chosen, limit=1000, cursor=cursor)
        rewards = {each.rollout_id: as_reward(each.reward) for each in page.items}
        if not rewards:
            break
        rollouts = await store.query_rollouts(rollout_id_in=list(rewards))
        found += [(each, rewards[each.rollout_id]) for each in rollouts if isinstance(each, AttemptedRollout)]
        if (cursor := page.cursor) is None:
            break
    return found


async def _with_inputs(store: LightningStore, pairs: Sequence[TaskPair]) -> list[TaskPair]:
    """Return the pairs with what their tasks ask."""
    ids = [rollout_id for pair in pairs if (rollout_id := pair.after_rollout_id or pair.before_rollout_id)]
    rollouts = await store.query_rollouts(rollout_id_in=ids) if ids else ()
    asked = {each.rollout_id: preview_of(input_text(each.input)) for each in rollouts}
    names = (asked.get(pair.after_rollout_id or pair.before_rollout_id or "", "") for pair in pairs)
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
