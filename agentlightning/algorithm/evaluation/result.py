"""The result of an evaluation: rewards and outcomes by task, the mean with its interval, and a paired comparison.

A task's reward is the mean of its samples that earned one. A fault is not a low reward: a task none of whose samples
earned anything has none, is left out of the mean, and is counted among the failures.

Interval: Wilson's for one sample per task and rewards that are all 0 or 1, else Student's t over the tasks. Comparison:
the exact sign test on the tasks that both sides have a reward of, which for rewards of 0 and 1 is McNemar's.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from agentlightning.algorithm.evaluation.statistics import Verdict, mcnemar_exact, proportion, t_interval
from agentlightning.field_help import explain_fields
from agentlightning.terminal import one_line

SCORED = ("scored", "policy_fault")
"""Outcomes that count with their reward."""


@dataclass(frozen=True, slots=True)
class EvaluatedRollout:
    """One sample of one task."""

    rollout_id: str
    outcome: str
    """Of its latest attempt; the status of the rollout where nobody claimed it."""
    reward: float | None
    seconds: float
    """Of its latest attempt, from claim to end; 0 where nobody claimed it."""
    failure: str | None = None
    """The class of the exception, else the reason in a word; None if it earned a reward."""


@dataclass(frozen=True, slots=True)
class EvaluatedTask:
    """A task and its samples."""

    input: Any
    rollouts: tuple[EvaluatedRollout, ...]

    @property
    def reward(self) -> float | None:
        """Mean over the samples that earned something; None without any."""
        earned = [rollout.reward for rollout in self.rollouts if rollout.reward is not None]
        return statistics.fmean(earned) if earned else None


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its confidence interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """Two evaluations of the same tasks, task by task."""

    difference: Interval | None
    """Of the rewards, the second minus the first; None without a pair. With one pair it is as wide as it can be."""
    pairs: int
    """Tasks that have a reward on both sides."""
    unpaired: int
    """Tasks that have none on at least one side."""
    gained: int
    lost: int
    """Pairs whose reward is higher, and lower, in the second."""
    p_value: float
    """Chance of a split of gained and lost at least as uneven as this one if nothing had changed."""
    verdict: Verdict
    """Whether the second is `better` or `worse`."""

    @override
    def __str__(self) -> str:
        changed = f"{self.gained} tasks gained, {self.lost} lost of {self.pairs} pairs ({self.unpaired} without)"
        by = "" if self.difference is None else f", mean difference {_interval_text(self.difference)}"
        return f"{self.verdict}: {changed}{by}, p = {self.p_value:.2g}"


@explain_fields
@dataclass(frozen=True)
class EvaluationResult:
    """The result of `Trainer.evaluate`; prints as a table."""

    tasks: tuple[EvaluatedTask, ...] = ()
    """In the order of the dataset."""
    seconds: float = 0.0
    """Of the whole evaluation."""
    run_id: str | None = None
    """The run that its rollouts belong to; None if it made none."""
    place: str = field(default="", compare=False)
    """Where its rollouts are kept."""

    @property
    def rewards(self) -> list[float | None]:
        """Of each task, in order; None where no sample earned anything."""
        return [task.reward for task in self.tasks]

    @property
    def rollouts(self) -> list[EvaluatedRollout]:
        """Every sample of every task."""
        return [rollout for task in self.tasks for rollout in task.rollouts]

    @property
    def outcomes(self) -> dict[str, int]:
        """Samples by outcome."""
        return dict(Counter(rollout.outcome for rollout in self.rollouts))

    @property
    def failures(self) -> dict[str, int]:
        """Samples that earned nothing, by the kind of their failure, the most frequent first."""
        return dict(Counter(r.failure for r in self.rollouts if r.failure is not None).most_common())

    @property
    def mean_reward(self) -> float | None:
        """Mean over the tasks that have a reward; None without any."""
        earned = [reward for reward in self.rewards if reward is not None]
        return statistics.fmean(earned) if earned else None

    def interval(self, confidence: float = 0.95) -> Interval | None:
        """Return the mean reward with its confidence interval; None without a task that has a reward.

        Raises:
            ValueError: `confidence` is not between 0 and 1.
        """
        return _interval([reward for reward in self.rewards if reward is not None], confidence)

    @property
    def durations(self) -> dict[str, float]:
        """Seconds that the samples took: `median`, `p90`, `longest`; empty without samples."""
        seconds = sorted(rollout.seconds for rollout in self.rollouts)
        if not seconds:
            return {}
        ninth = seconds[max(0, -(-9 * len(seconds) // 10) - 1)]
        return {"median": statistics.median(seconds), "p90": ninth, "longest": seconds[-1]}

    def compare(self, other: EvaluationResult, *, significance: float = 0.05) -> PairedComparison:
        """Return whether `other` is better than this one on the same tasks.

        The verdict is `better` or `worse` only if the p-value is below `significance`.

        Raises:
            ValueError: the tasks differ, or `significance` is not between 0 and 1.
        """
        self._check_same_tasks(other)
        if not 0.0 < significance < 1.0:
            raise ValueError(f"significance={significance} must be between 0 and 1")
        both = zip(self.rewards, other.rewards, strict=True)
        changes = [after - before for before, after in both if before is not None and after is not None]
        gained, lost = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
        p_value = mcnemar_exact(gained, lost)
        verdict: Verdict = "no evidence"
        if p_value < significance:
            verdict = "better" if gained > lost else "worse"
        difference = Interval(*t_interval(changes)) if changes else None
        return PairedComparison(
            difference, len(changes), len(self.tasks) - len(changes), gained, lost, p_value, verdict
        )

    def _check_same_tasks(self, other: EvaluationResult) -> None:
        if len(self.tasks) != len(other.tasks):
            raise ValueError(
                f"a paired comparison needs the same tasks: {len(self.tasks)} here, {len(other.tasks)} there"
            )
        for number, (mine, its) in enumerate(zip(self.tasks, other.tasks, strict=True)):
            if mine.input != its.input:
                raise ValueError(
                    f"a paired comparison needs the same tasks in the same order: task {number} is {mine.input!r} here "
                    f"and {its.input!r} there"
                )

    @override
    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=100, color_system=None)
        with console.capture() as captured:
            console.print(self)
        return captured.get().rstrip("\n")

    def __rich__(self) -> Any:
        """Return the table that a rich console prints."""
        from rich.table import Table
        from rich.text import Text

        title = f"evaluation: {len(self.tasks)} tasks, {len(self.rollouts)} rollouts"
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column("")
        table.add_column("", justify="right")
        table.add_column("")
        found = self.interval()
        counted = sum(reward is not None for reward in self.rewards)
        if found is None:
            table.add_row("mean reward", "-", "no task has a reward")
        else:
            spread = "" if counted < 2 else f"95 % interval {found.low:.3f} to {found.high:.3f}, "
            table.add_row("mean reward", f"{found.mean:.3f}", f"{spread}{counted} of {len(self.tasks)} tasks")
        for outcome, count in sorted(self.outcomes.items()):
            table.add_row(Text(one_line(outcome)), str(count), "")
        for failure, count in self.failures.items():
            table.add_row("  failed", str(count), Text(one_line(failure)))
        for name, seconds in self.durations.items():
            table.add_row(f"{name} time", f"{seconds:.2f} s", "")
        table.add_row(
            "whole time", f"{self.seconds:.2f} s", Text(one_line(f"kept in {self.place}")) if self.place else ""
        )
        return table


def _interval(rewards: Sequence[float], confidence: float = 0.95) -> Interval | None:
    if not rewards:
        return None
    if all(reward in (0.0, 1.0) for reward in rewards):
        share = proportion([reward == 1.0 for reward in rewards], confidence=confidence)
        return Interval(share.mean, share.low, share.high)
    return Interval(*t_interval(rewards, confidence=confidence))


def _interval_text(interval: Interval) -> str:
    return f"{interval.mean:+.3f} ({interval.low:+.3f} to {interval.high:+.3f})"
