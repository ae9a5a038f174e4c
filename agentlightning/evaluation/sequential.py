"""Sequential stopping: an evaluation ends once it is sure which of two sides is better, however often one looks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentlightning.evaluation.betting import Bet
from agentlightning.evaluation.result import EvaluationResult
from agentlightning.evaluation.statistics import check_share
from agentlightning.evaluation.tasks import tasks_of
from agentlightning.field_help import explain_fields


@explain_fields
@dataclass(frozen=True)
class SequentialStop:
    """When an evaluation may end early: `trainer.evaluate(..., stop_early=SequentialStop(threshold=0.8))`.

    Tasks run in a random order, so many at a time; after each batch the evaluation ends if it is sure that its mean
    reward is above or below the `threshold`, or that it is better or worse than the `baseline` on the same tasks. A
    task without a reward says nothing. A reward outside of `reward_range` takes the test its guarantee: then all tasks
    run, and the verdict is `no evidence`.

    Raises:
        ValueError: not exactly one of `baseline` and `threshold`; a figure out of its range.
    """

    baseline: EvaluationResult | None = None
    """The evaluation to beat, of the same tasks in the same order."""
    threshold: float | None = None
    """The mean reward to beat; inside of the range."""
    significance: float = 0.05
    """The greatest probability of a verdict where there is no difference."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """The least and greatest reward that there can be; a narrow one decides sooner."""
    batch: int = 16
    """Tasks that run between two looks; no less than what the runners run at once."""
    seed: int = 0
    """Seed of the order of the tasks."""

    def __post_init__(self) -> None:
        low, high = self.reward_range
        if (self.baseline is None) == (self.threshold is None):
            raise ValueError("SequentialStop needs either a baseline or a threshold, one of the two")
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(f"reward_range={self.reward_range} must be two finite numbers, the lower one first")
        if self.threshold is not None and not low < self.threshold < high:
            raise ValueError(f"threshold={self.threshold} must lie inside of reward_range={self.reward_range}")
        check_share("significance", self.significance)
        if self.batch < 1:
            raise ValueError(f"batch={self.batch} must be at least 1")

    def bets(self) -> tuple[Bet, Bet]:
        """Return a bet on better and one on worse."""
        low, high = self.reward_range
        if self.threshold is None:
            return Bet(high - low), Bet(high - low)
        return Bet(self.threshold - low), Bet(high - self.threshold)


def check_baseline(rule: object, tasks: Sequence[object]) -> None:
    """Check a rule before its evaluation begins.

    Raises:
        TypeError: it is none.
        ValueError: its baseline is of other tasks.
    """
    if not isinstance(rule, SequentialStop):
        raise TypeError(f"stop_early must be a SequentialStop; got {type(rule).__name__}")
    if rule.baseline is None:
        return
    base = [task.digest or tasks_of([task.input])[0] for task in rule.baseline.tasks]
    if base != tasks_of(tasks):
        raise ValueError(
            f"stop_early compares with the baseline task by task: it has {len(base)} tasks, here are {len(tasks)}; "
            "they must be the same in the same order, and none of them left out"
        )
