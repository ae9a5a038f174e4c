"""Which evaluations of two runs are of the same tasks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agentlightning.errors import BadRequestError, closest_name
from agentlightning.evaluation.records import result_of
from agentlightning.evaluation.result import EvaluationResult
from agentlightning.types.runs import RunRecord


@dataclass(frozen=True)
class RecordedEvaluation:
    """An evaluation that a run has recorded."""

    name: str
    step: int
    result: EvaluationResult
    family: str = ""
    """What it shares with those of other versions of a prompt: its name without ` of <version>`."""


def last_evaluations(records: Sequence[RunRecord], run_id: str = "") -> list[RecordedEvaluation]:
    """Return the last evaluation of each name that has rewards by task, the latest one first.

    Where they are of several versions of a prompt (`version`), `validation` and `validation of v3` are one name, and it
    is the best of them: that is what the run ends with.

    Raises:
        BadRequestError: one of them is not readable.
    """
    last: dict[str, RunRecord] = {}
    for record in records:
        if record.kind == "evaluation":
            known = last.get(name := _family(record))
            if known is None or "version" not in record.data or _value(record) > _value(known):
                last[name] = record
    found: list[RecordedEvaluation] = []
    for record in last.values():
        try:
            result = result_of(record.data, run_id)
        except ValueError as error:
            raise BadRequestError(f"run {run_id or '-'}, evaluation {record.name!r}: {error}") from None
        if result is not None and result.tasks:
            found.append(RecordedEvaluation(record.name, record.step, result, _family(record)))
    return sorted(found, key=lambda each: each.step, reverse=True)


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
    """Return the evaluations of two runs that share most tasks: of equal names first, and the later ones first.

    With a `name`, of that one.

    Raises:
        BadRequestError: a run has no such evaluation, or no two share a task; says what there is.
    """
    sides = [_named(side, name, run) for side, run in zip((records, others), runs, strict=True)]
    best: tuple[tuple[int, bool], RecordedEvaluation, RecordedEvaluation] | None = None
    for mine in sides[0]:
        for theirs in sides[1]:
            rank = _shared(mine.result, theirs.result), mine.family == theirs.family
            if rank[0] and (best is None or rank > best[0]):
                best = rank, mine, theirs
    if best is None:
        told = [f"run {run or '-'} has {_told(side)}" for side, run in zip(sides, runs, strict=True)]
        raise BadRequestError(
            f"no evaluations of these runs have a task in common: {'; '.join(told)}. Evaluate both on one dataset"
        )
    return best[1], best[2]


def _named(records: Sequence[RunRecord], name: str | None, run: str) -> list[RecordedEvaluation]:
    asked = [record for record in records if record.name == name and _family(record) != name]  # one version's own
    found = last_evaluations(asked or records, run)
    if not found:
        recorded = sorted({record.name for record in records if record.kind == "evaluation"})
        held = f"no rewards by task in its evaluations ({', '.join(recorded)})" if recorded else "no evaluation"
        raise BadRequestError(
            f"run {run or '-'} cannot be compared task by task: it has {held}. Record one: Trainer.evaluate(), "
            "held-out tasks of GRPO, or run.evaluation() with rewards and tasks"
        )
    if name is None:
        return found
    chosen = [each for each in found if name in (each.name, each.family)]
    if not chosen:
        names = [each.family for each in found]
        near = closest_name(name, names)
        hint = f"did you mean {near!r}?" if near else f"there are: {', '.join(names)}"
        raise BadRequestError(f"run {run or '-'} has no evaluation {name!r} with rewards by task; {hint}")
    return chosen


def _shared(one: EvaluationResult, other: EvaluationResult) -> int:
    counts = (Counter(task.digest for task in side.tasks) for side in (one, other))
    return sum((next(counts) & next(counts)).values())


def _told(found: Sequence[RecordedEvaluation]) -> str:
    return ", ".join(f"{each.name} ({len(each.result.tasks)} tasks)" for each in found)
