"""Evaluations as `evaluation` records of runs: write, read, and pair them with those of another run.

Tasks are recorded as digests. Only rollouts contain the text of a task.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from agentlightning.errors import BadRequestError, closest_name
from agentlightning.evaluation.paired import Stopping
from agentlightning.evaluation.result import EvaluatedRollout, EvaluatedTask, EvaluationResult
from agentlightning.types.runs import RunRecord

MOST_BYTES = 6 * 1024 * 1024
"""Maximum size of a record (limit: 8 MiB). Parts above it are dropped, samples first, and named in `left_out`."""
_LARGEST = 1e100


def _filled(sample: object) -> object:
    return {"reward": None, **cast("dict[str, Any]", sample)} if isinstance(sample, dict) else sample


@dataclass
class _Record:
    """The fields of a record that form a result, in the order in which they are checked."""

    rewards: list[float | None]
    tasks: list[str]
    samples: list[list[Annotated[EvaluatedRollout, BeforeValidator(_filled)]]] | None
    rollout_ids: list[str] | None
    slices: list[tuple[str, ...]]
    repeats: list[int | None]
    stopping: Stopping | None
    left_out: list[str]


_RECORD: TypeAdapter[_Record] = TypeAdapter(_Record)


def record_of(result: EvaluationResult, tasks: Sequence[str]) -> dict[str, Any]:
    """Return the data of a record. `tasks`: (T,) digests, see `tasks_of`."""
    data: dict[str, Any] = {"rewards": result.rewards, "tasks": list(tasks), "n_samples": result.n_samples}
    data |= {"outcomes": result.outcomes, "failures": result.failures, "seconds": result.seconds}
    data["interval"] = _interval(result)
    if result.dimensions:
        data["dimensions"] = {name: _interval(result.dimension(name)) for name in result.dimensions}
    if any(task.slices for task in result.tasks):
        data["slices"] = [list(task.slices) for task in result.tasks]
    if result.stopping is not None:
        data["stopping"] = dataclasses.asdict(result.stopping)
        if any(task.repeat for task in result.tasks):
            data["repeats"] = [task.repeat for task in result.tasks]
    samples = ([dataclasses.asdict(rollout) for rollout in task.rollouts] for task in result.tasks)
    empty: Any = (None, {})
    data["samples"] = [[{k: v for k, v in own.items() if v not in empty} for own in group] for group in samples]
    droppable = [name for name in ("samples", "slices", "repeats", "tasks", "rewards") if name in data]
    sizes = {name: len(json.dumps(data[name])) for name in droppable}
    for name in droppable:
        if sum(sizes.values()) <= MOST_BYTES:
            break
        del sizes[name], data[name]
        data.setdefault("left_out", []).append(name)
    return data


def _interval(result: EvaluationResult) -> dict[str, Any] | None:
    interval = result.interval()
    return None if interval is None else dataclasses.asdict(interval)


def result_of(data: Mapping[str, Any], run_id: str | None = None) -> EvaluationResult | None:
    """Return the evaluation of a record; None if it has no rewards by task.

    Records of other algorithms require only `rewards` and `tasks`. `rollout_ids` (one per task) link to conversations.

    Raises:
        ValueError: A field has an invalid value. The message names the field.
    """
    if not isinstance(data.get("rewards"), list) or not isinstance(data.get("tasks"), list):
        return None
    samples, count = data.get("samples"), len(data["tasks"])
    fields = {name: data.get(name) for name in ("rewards", "tasks", "stopping")}
    fields |= {"samples": samples, "rollout_ids": data.get("rollout_ids") if samples is None else None}
    fields |= {name: data.get(name) or [empty] * count for name, empty in (("slices", ()), ("repeats", None))}
    fields["left_out"] = data.get("left_out") or []
    try:
        record = _RECORD.validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"][1:]))
        raise ValueError(f"an evaluation record is not readable: {where}: {first['msg']}") from None
    columns = {"tasks": record.tasks, "samples": record.samples if record.samples is not None else _samples(record)}
    columns |= {"slices": record.slices, "repeats": record.repeats}
    if any(len(column) != len(record.rewards) for column in columns.values()):
        lengths = ", ".join(f"{len(column)} {name}" for name, column in columns.items())
        raise ValueError(f"an evaluation record is not readable: it has {len(record.rewards)} rewards, {lengths}")
    tasks = tuple(
        EvaluatedTask(digest, tuple(group), slices, digest, repeat)
        for digest, group, slices, repeat in zip(*columns.values(), strict=True)
    )
    seconds = data.get("seconds")
    seconds = float(seconds) if isinstance(seconds, (int, float)) else 0.0
    result = EvaluationResult(tasks, seconds, run_id, stopping=record.stopping, left_out=tuple(record.left_out))
    if why := why_not_comparable(result):
        raise ValueError(why)
    return result


def _samples(record: _Record) -> list[list[EvaluatedRollout]]:
    """Return one sample per task, for a record without samples."""
    ids = record.rollout_ids or []
    if len(ids) != len(record.rewards):
        ids = [""] * len(record.rewards)
    return [
        [EvaluatedRollout(rollout_id, "scored" if reward is not None else "unknown", reward, 0.0)]
        for rollout_id, reward in zip(ids, record.rewards, strict=True)
    ]


def why_not_comparable(result: EvaluationResult) -> str:
    """Return a message if a reward or one of its dimensions is too large to compare, otherwise an empty string."""
    values = (value for each in result.rollouts for value in (each.reward, *each.dimensions.values()))
    large = next((value for value in values if value is not None and abs(value) > _LARGEST), None)
    if large is None:
        return ""
    return f"rewards must be at most {_LARGEST:g}, because squares of larger ones are not finite; got {large:g}"


@dataclass(frozen=True)
class RecordedEvaluation:
    """A recorded evaluation of a run."""

    name: str
    step: int
    result: EvaluationResult
    family: str = ""
    """Name without ` of <version>`, shared by the evaluations of all versions of a prompt."""


def last_evaluations(records: Sequence[RunRecord], run_id: str = "") -> list[RecordedEvaluation]:
    """Return the last evaluation of each name that has rewards by task, latest first.

    For evaluations of several versions of a prompt (`version`), `validation` and `validation of v3` count as one name.
    The best of them is returned, because it is the result of the run.

    Raises:
        BadRequestError: A record is not readable.
    """
    last: dict[str, RunRecord] = {}
    for record in records:
        if record.kind == "evaluation":
            earlier = last.get(name := _family(record))
            if earlier is None or "version" not in record.data or _value(record) > _value(earlier):
                last[name] = record
    evaluations: list[RecordedEvaluation] = []
    for name, record in last.items():
        try:
            result = result_of(record.data, run_id)
        except ValueError as error:
            raise BadRequestError(f"run {run_id or '-'}, evaluation {record.name!r}: {error}") from None
        if result is not None and result.tasks:
            evaluations.append(RecordedEvaluation(record.name, record.step, result, name))
    return sorted(evaluations, key=lambda each: each.step, reverse=True)


def _family(record: RunRecord) -> str:
    version = record.data.get("version")
    return record.name.removesuffix(f" of {version}") if isinstance(version, str) else record.name


def _value(record: RunRecord) -> float:
    value = record.data.get("value")
    return float(value) if isinstance(value, (int, float)) else -math.inf


def same_tasks(
    records: Sequence[RunRecord],
    others: Sequence[RunRecord],
    *,
    name: str | None = None,
    runs: tuple[str, str] = ("first", "second"),
) -> tuple[RecordedEvaluation, RecordedEvaluation]:
    """Return the two evaluations with the most common tasks. The same name and later ones have priority.

    With a `name`, only evaluations with that name are considered.

    Raises:
        BadRequestError: A run has no such evaluation, or no two have a common task. The message lists the evaluations.
    """
    sides = [_named(side, name, run) for side, run in zip((records, others), runs, strict=True)]

    def rank(pair: tuple[RecordedEvaluation, ...]) -> tuple[int, bool]:
        counts = [Counter(task.digest for task in each.result.tasks) for each in pair]
        return (counts[0] & counts[1]).total(), pair[0].family == pair[1].family

    one, other = max(itertools.product(*sides), key=rank)
    if not rank((one, other))[0]:
        lists = (", ".join(f"{each.name} (tasks: {len(each.result.tasks)})" for each in side) for side in sides)
        held = "; ".join(f"run {run or '-'} has {names}" for run, names in zip(runs, lists, strict=True))
        raise BadRequestError(
            f"the evaluations of these runs have no task in common: {held}. Evaluate both on the same dataset"
        )
    return one, other


def _named(records: Sequence[RunRecord], name: str | None, run: str) -> list[RecordedEvaluation]:
    """Return the evaluations with a name, or all; at least one."""
    of_version = [record for record in records if record.name == name and _family(record) != name]
    evaluations = last_evaluations(of_version or records, run)
    if not evaluations:
        recorded = sorted({record.name for record in records if record.kind == "evaluation"})
        held = f"no reward per task in its evaluations ({', '.join(recorded)})" if recorded else "no evaluation"
        raise BadRequestError(
            f"run {run or '-'} cannot be compared task by task: it has {held}. Record an evaluation with "
            "Trainer.evaluate(), held-out tasks of GRPO, or run.evaluation() with rewards and tasks"
        )
    matches = [each for each in evaluations if name in (None, each.name, each.family)]
    if name is not None and not matches:
        names = [each.family for each in evaluations]
        near = closest_name(name, names)
        hint = f"did you mean {near!r}?" if near else f"expected one of: {', '.join(names)}"
        raise BadRequestError(f"run {run or '-'} has no evaluation {name!r} with a reward per task; {hint}")
    return matches
