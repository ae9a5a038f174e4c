"""Two runs side by side: settings that differ, figures step by step, best results, evaluations task by task."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard, cast

from agentlightning.errors import BadRequestError
from agentlightning.evaluation.paired import PairedComparison, compare_rewards
from agentlightning.evaluation.pairing import RecordedEvaluation, same_tasks
from agentlightning.evaluation.records import result_of
from agentlightning.evaluation.result import EvaluationResult, sequential_range, shared_tasks
from agentlightning.evaluation.tasks import tasks_of as tasks_of
from agentlightning.field_help import explain_fields
from agentlightning.types.runs import Run, RunRecord


@explain_fields
@dataclass
class RunComparison:
    """What differs between two runs, each value as (first, second)."""

    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict[str, tuple[Any, Any]])
    """Settings and versions that differ, by their dotted names."""
    figures: dict[str, list[tuple[int, float | None, float | None]]] = field(
        default_factory=dict[str, list[tuple[int, float | None, float | None]]]
    )
    """Numbers of the steps, by their dotted names: (step, first, second)."""
    evaluations: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """The last evaluation of each name that both have: values, and what the paired test on the same tasks says. Of two
    searches over prompts, what they ended with. Where none can be paired, the two that share most tasks."""
    why_no_evaluation: str = ""
    """Why nothing was compared task by task; empty if something was."""


def compare_runs(first: Run, second: Run, records: Sequence[RunRecord], others: Sequence[RunRecord]) -> RunComparison:
    """Compare two runs by their records of the kinds `step` and `evaluation`."""
    mine = {**flat(first.config or {}), **flat({"versions": first.versions or {}})}
    theirs = {**flat(second.config or {}), **flat({"versions": second.versions or {}})}
    names = sorted(mine.keys() | theirs.keys())
    differing = {name: (mine.get(name), theirs.get(name)) for name in names if mine.get(name) != theirs.get(name)}
    found = _evaluations(records, others)
    why, searches = "", all(any(map(_of_version, side)) for side in (records, others))
    if searches or not any("verdict" in line for line in found):
        sides = [[r for r in side if _of_version(r)] if searches else side for side in (records, others)]
        try:
            pair = same_tasks(*sides, runs=(first.run_id, second.run_id))
        except BadRequestError as error:
            why = "" if found else str(error)
        else:  # what two searches ended with; or evaluations of two names, or of tasks that are the same in part
            found.append(_of_pair(*pair))
    return RunComparison(differing, _figures(records, others), found, why)


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return nested values under dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(cast("Mapping[str, Any]", value), f"{before}{name}.")
        else:
            found[before + name] = value
    return found


def curve(records: Iterable[RunRecord], name: str) -> dict[int, float]:
    """Return a figure of the steps that have it, by step; `name` is dotted, such as `update.loss`."""
    steps = ((record.step, flat(record.data).get(name)) for record in records if record.kind == "step")
    return {step: float(value) for step, value in steps if _is_number(value)}


def _figures(
    records: Sequence[RunRecord], others: Sequence[RunRecord]
) -> dict[str, list[tuple[int, float | None, float | None]]]:
    sides = [{r.step: flat(r.data) for r in side if r.kind == "step"} for side in (records, others)]
    names = [
        {name: None for figures in side.values() for name, value in figures.items() if _is_number(value)}
        for side in sides
    ]
    shared = [name for name in names[0] if name in names[1] and name not in ("step", "steps")]
    steps = sorted(sides[0].keys() | sides[1].keys())

    def value(side: dict[int, dict[str, Any]], step: int, name: str) -> float | None:
        found = side.get(step, {}).get(name)
        return float(found) if _is_number(found) else None

    return {
        name: [(step, value(sides[0], step, name), value(sides[1], step, name)) for step in steps] for name in shared
    }


def _evaluations(records: Sequence[RunRecord], others: Sequence[RunRecord]) -> list[dict[str, Any]]:
    sides = [  # the last of each name; of searches over prompts the last version is not the one that they end with
        {r.name: r for r in side if r.kind == "evaluation" and not _of_version(r)} for side in (records, others)
    ]
    found: list[dict[str, Any]] = []
    for name in sides[0]:
        if name not in sides[1]:
            continue
        mine, theirs = sides[0][name], sides[1][name]
        line: dict[str, Any] = {
            "name": name,
            "steps": (mine.step, theirs.step),
            "values": (mine.data.get("value"), theirs.data.get("value")),
        }
        try:
            before, after = result_of(mine.data), result_of(theirs.data)
        except ValueError as error:
            line["why_not_paired"] = str(error)
            found.append(line)
            continue
        if before is None or after is None:
            line["why_not_paired"] = "the records hold no rewards by task"
        else:
            try:
                paired = before.compare(after)
            except ValueError:
                line["why_not_paired"] = "the tasks differ"
            else:
                line |= _told(paired)
        found.append(line)
    return found


def _of_version(record: RunRecord) -> bool:
    """Return whether it is the evaluation of one of several versions of a prompt."""
    return record.kind == "evaluation" and isinstance(record.data.get("version"), str)


def _of_pair(mine: RecordedEvaluation, theirs: RecordedEvaluation) -> dict[str, Any]:
    pairs = shared_tasks(mine.result, theirs.result)
    sides = [EvaluationResult(tuple(side)) for side in zip(*pairs, strict=True)]
    ranged = sequential_range(mine.result, theirs.result)
    paired = compare_rewards(sides[0].rewards, sides[1].rewards, stopped_in=ranged)
    names = mine.name if mine.name == theirs.name else f"{mine.name} and {theirs.name}"
    line = {"name": names, "steps": (mine.step, theirs.step), "shared_tasks": len(pairs)}
    values = sides[0].mean_reward, sides[1].mean_reward
    return {**line, "values": values, **_told(paired)}


def _told(paired: PairedComparison) -> dict[str, Any]:
    names = ("verdict", "p_value", "pairs", "gained", "lost", "method")
    return {**{name: getattr(paired, name) for name in names}, "text": str(paired)}


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
