"""The update of a step, policy by policy: made by the loop, and again by a replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from agentlightning.training.learner.row_figures import RowFigures
from agentlightning.training.learner.step import update_policy
from agentlightning.training.learner.update import UpdateResult
from agentlightning.training.policies.learners import Learner, Learners

if TYPE_CHECKING:
    from agentlightning.adapter.rows.samples import Sample

_COUNTS: Final = ("steps", "skipped_steps", "rows", "rollouts", "tokens")
_LARGEST: Final = ("first_ratio_error",)


@dataclass
class StepUpdate:
    """What the update of a step did to every policy."""

    figures: dict[str, float]
    """Of the whole: counts are sums, errors the largest one, all others means over the policies, weighted by their
    trained tokens. Where there are several policies, those of each beside, under `NAME/FIGURE`."""
    rows: list[RowFigures]
    """(B,) figures of each row that the loss used, in the order of the samples."""
    changed: frozenset[str | None]
    """The policies whose weights took a step."""
    notes: list[str] = field(default_factory=list[str])
    """What the user should hear of."""


def update_learners(
    learners: Learners,
    samples: Sequence[Sample],
    advantages: Sequence[float],
    *,
    step: int,
    shares: Mapping[str | None, float],
) -> StepUpdate:
    """Let each policy learn from its own rows; one without rows stays as it is.

    Shapes: samples: (B,), advantages: (B,). `shares` is the weight that a policy's rows have in its mean of the step.
    """
    before, found = learners.weight_version, dict[str | None, UpdateResult]()
    rows: dict[int, RowFigures] = {}
    for learner in learners.all:
        own = [row for row, sample in enumerate(samples) if learner.takes(sample)]
        if own:
            result = found[learner.name] = update_policy(
                learner.policy,
                learner.settings,
                [samples[row] for row in own],
                [advantages[row] for row in own],
                step=step,
                share=shares[learner.name],
            )
            rows |= dict(zip(own, result.rows, strict=True))
            result.figures["share"] = shares[learner.name]
    changed = frozenset(name for name, result in found.items() if result.figures["steps"])
    if changed:
        learners.advance(before + 1)
    return StepUpdate(
        _combined(found),
        [rows[row] for row in range(len(samples))],
        changed,
        [
            _named(learner, note)
            for learner in learners.all
            if learner.name in found
            for note in found[learner.name].notes
        ],
    )


def _combined(results: Mapping[str | None, UpdateResult]) -> dict[str, float]:
    if None in results:
        return results[None].figures
    each = {str(name): result.figures for name, result in results.items()}
    combined: dict[str, float] = {}
    for key in next(iter(each.values())):
        if any(key not in figures for figures in each.values()):  # not every policy had stale tokens
            continue
        of = {name: figures[key] for name, figures in each.items()}
        if key in _COUNTS:
            combined[key] = sum(of.values())
        elif key in _LARGEST:
            combined[key] = max(of.values())
        else:
            tokens = {name: figures["tokens"] for name, figures in each.items() if figures["steps"]}
            total = sum(tokens.values())
            combined[key] = sum(of[name] * tokens[name] / total for name in tokens) if total else float("nan")
    return combined | {f"{name}/{key}": value for name, figures in each.items() for key, value in figures.items()}


def _named(learner: Learner, note: str) -> str:
    return note if learner.name is None else f"policy {learner.name}: {note}"
