"""Two runs side by side: settings that differ, figures step by step, best results, evaluations task by task."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard, cast

from agentlightning.algorithm.evaluation.result import EvaluatedRollout, EvaluatedTask, EvaluationResult
from agentlightning.field_help import explain_fields
from agentlightning.store.rules.values import to_json
from agentlightning.types.runs import Run, RunRecord

_DIGEST = 16


def tasks_of(tasks: Iterable[object]) -> list[str]:
    """Return a digest of each task: equal tasks have equal ones, and the task cannot be read from it."""
    return [_digest(task) for task in tasks]


def _digest(task: object) -> str:
    text = json.dumps(to_json(task, "task"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST]


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
    """The last evaluation of each name that both have: values, and what the paired test on the same tasks says."""


def compare_runs(first: Run, second: Run, records: Sequence[RunRecord], others: Sequence[RunRecord]) -> RunComparison:
    """Compare two runs by their records of the kinds `step` and `evaluation`."""
    mine = {**flat(first.config or {}), **flat({"versions": first.versions or {}})}
    theirs = {**flat(second.config or {}), **flat({"versions": second.versions or {}})}
    names = sorted(mine.keys() | theirs.keys())
    differing = {name: (mine.get(name), theirs.get(name)) for name in names if mine.get(name) != theirs.get(name)}
    return RunComparison(differing, _figures(records, others), _evaluations(records, others))


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
    sides = [{r.name: r for r in side if r.kind == "evaluation"} for side in (records, others)]  # the last of each name
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
        results = [_result_of(side.data) for side in (mine, theirs)]
        if results[0] is None or results[1] is None:
            line["why_not_paired"] = "the records hold no rewards by task"
        else:
            try:
                paired = results[0].compare(results[1])
            except ValueError:
                line["why_not_paired"] = "the tasks differ"
            else:
                line |= {"verdict": paired.verdict, "p_value": paired.p_value, "pairs": paired.pairs}
                line |= {"gained": paired.gained, "lost": paired.lost, "text": str(paired)}
        found.append(line)
    return found


def _result_of(data: Mapping[str, Any]) -> EvaluationResult | None:
    rewards, tasks = data.get("rewards"), data.get("tasks")
    if not isinstance(rewards, list) or not isinstance(tasks, list) or len(rewards) != len(tasks):  # pyright: ignore[reportUnknownArgumentType] -- JSON data
        return None
    pairs = zip(cast("list[str]", tasks), cast("list[float | None]", rewards), strict=True)
    return EvaluationResult(
        tuple(EvaluatedTask(task, (EvaluatedRollout("", "scored", reward, 0.0),)) for task, reward in pairs)
    )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
