"""Comparison of two runs: settings that differ, metrics by step, best results, and evaluations by task."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard, cast

from agentlightning.base.field_help import explain_fields
from agentlightning.base.terminal import counted
from agentlightning.errors import BadRequestError
from agentlightning.evaluation.paired import PairedComparison
from agentlightning.evaluation.records import RecordedEvaluation, result_of, same_tasks
from agentlightning.evaluation.result import shared_tasks
from agentlightning.evaluation.tasks import tasks_of as tasks_of
from agentlightning.types.runs import Run, RunRecord

_Points = list[tuple[int, float | None, float | None]]


@explain_fields
@dataclass
class RunComparison:
    """The differences between two runs, each value as (first, second)."""

    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict[str, tuple[Any, Any]])
    """Settings and versions that differ, by dotted name."""
    figures: dict[str, _Points] = field(default_factory=dict[str, _Points])
    """Metrics of the steps, by dotted name: (step, first, second)."""
    evaluations: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Last evaluation of each name that both runs have: values, and the paired test on the same tasks. For two prompt
    searches, their final evaluations. If none can be paired, the two with the most common tasks."""
    why_no_evaluation: str = ""
    """Reason why no evaluation was compared by task; empty if one was."""


def compare_runs(first: Run, second: Run, records: Sequence[RunRecord], others: Sequence[RunRecord]) -> RunComparison:
    """Compare two runs from their records of the kinds `step` and `evaluation`."""
    mine, theirs = (flat(run.config or {}) | flat({"versions": run.versions or {}}) for run in (first, second))
    names = sorted(mine.keys() | theirs.keys())
    settings = {name: (mine.get(name), theirs.get(name)) for name in names if mine.get(name) != theirs.get(name)}
    evaluations = _evaluations(records, others)
    why, searches = "", all(any(map(_is_of_version, side)) for side in (records, others))
    if searches or not any("verdict" in line for line in evaluations):
        sides = [[r for r in side if _is_of_version(r)] if searches else side for side in (records, others)]
        try:
            pair = same_tasks(*sides, runs=(first.run_id, second.run_id))
        except BadRequestError as error:
            why = "" if evaluations else str(error)
        else:  # final evaluations of two searches, or evaluations of two names or of partly equal tasks
            evaluations.append(_of_pair(*pair))
    return RunComparison(settings, _figures(records, others), evaluations, why)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted name."""
    flattened: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flattened |= flat(cast("Mapping[str, Any]", value), f"{prefix}{name}.")
        else:
            flattened[prefix + name] = value
    return flattened


def curve(records: Iterable[RunRecord], name: str) -> dict[int, float]:
    """Return a metric of the steps that have it, by step. `name` is dotted, such as `update.loss`."""
    steps = ((record.step, flat(record.data).get(name)) for record in records if record.kind == "step")
    return {step: float(value) for step, value in steps if _is_number(value)}


def _figures(records: Sequence[RunRecord], others: Sequence[RunRecord]) -> dict[str, _Points]:
    """Return the metrics that the steps of both runs have, in the order of the first run."""
    mine, theirs = (
        {r.step: {n: float(v) for n, v in flat(r.data).items() if _is_number(v)} for r in side if r.kind == "step"}
        for side in (records, others)
    )
    names, other_names = ({name: None for figures in side.values() for name in figures} for side in (mine, theirs))
    shared = [name for name in names if name in other_names and name not in ("step", "steps")]
    steps = sorted(mine.keys() | theirs.keys())
    return {name: [(s, mine.get(s, {}).get(name), theirs.get(s, {}).get(name)) for s in steps] for name in shared}


def _evaluations(records: Sequence[RunRecord], others: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return the last evaluation of each name that both runs have, without evaluations of prompt versions."""
    mine, theirs = (
        {r.name: r for r in side if r.kind == "evaluation" and not _is_of_version(r)} for side in (records, others)
    )
    return [_of_name(mine[name], theirs[name]) for name in mine if name in theirs]


def _is_of_version(record: RunRecord) -> bool:
    """Return whether an evaluation belongs to one of several versions of a prompt."""
    return record.kind == "evaluation" and isinstance(record.data.get("version"), str)


def _of_name(mine: RunRecord, theirs: RunRecord) -> dict[str, Any]:
    line: dict[str, Any] = {"name": mine.name, "steps": (mine.step, theirs.step)}
    line["values"] = mine.data.get("value"), theirs.data.get("value")
    try:
        before, after = result_of(mine.data), result_of(theirs.data)
    except ValueError as error:
        return {**line, "why_not_paired": str(error)}
    if before is None or after is None:
        return {**line, "why_not_paired": "the records have no reward per task"}
    try:
        return {**line, **_test(before.compare(after))}
    except ValueError:
        tasks = f"{len(before.tasks)} and {counted(len(after.tasks), 'task')}"
        return {**line, "why_not_paired": f"the tasks differ ({tasks})"}


def _of_pair(mine: RecordedEvaluation, theirs: RecordedEvaluation) -> dict[str, Any]:
    shared = zip(*shared_tasks(mine.result, theirs.result), strict=True)
    before, after = (replace(side.result, tasks=tasks) for side, tasks in zip((mine, theirs), shared, strict=True))
    return {
        "name": mine.name if mine.name == theirs.name else f"{mine.name} and {theirs.name}",
        "steps": (mine.step, theirs.step),
        "shared_tasks": len(before.tasks),
        "values": (before.mean_reward, after.mean_reward),
        **_test(before.compare(after)),
    }


def _test(paired: PairedComparison) -> dict[str, Any]:
    names = ("verdict", "p_value", "pairs", "gained", "lost", "method")
    return {**{name: getattr(paired, name) for name in names}, "text": str(paired)}


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
