"""The result of an evaluation: rewards and outcomes by task, metrics with their intervals, and a paired comparison.

A task's reward is the mean over its samples with a reward. An error is not a low reward: a task without any sample
with a reward has no reward, is excluded from the mean, and counts as a failure. Intervals and tests use tasks as the
sampling unit, because samples of one task are similar (Miller, "Adding error bars to evals", arXiv:2411.00640).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import override

from agentlightning.base.field_help import explain_fields
from agentlightning.base.terminal import counted, one_line
from agentlightning.errors import closest_name
from agentlightning.evaluation.paired import SEQUENTIAL_TEST, PairedComparison, Stopping, compare_rewards
from agentlightning.evaluation.statistics import Interval, IntervalMethod, check_share, interval_of
from agentlightning.evaluation.tasks import tasks_of
from agentlightning.utils.rewards import as_reward

SCORED = ("scored", "policy_fault")
"""Outcomes of samples whose reward counts."""
SUCCESS = 0.5
"""Reward above which a sample is a success, for rewards of 0 and 1."""
_Row = tuple[str, str, str]
"""Name, value and remark."""


@dataclass(frozen=True, slots=True)
class EvaluatedRollout:
    """One sample of one task."""

    rollout_id: str
    outcome: str
    """Outcome of the latest attempt, or the status of the rollout if it was not claimed."""
    reward: float | None
    seconds: float
    """Duration of the latest attempt in seconds, from claim to end; 0 if the rollout was not claimed."""
    failure: str | None = None
    """Class of the exception, or the reason as one word; None if the sample has a reward."""
    dimensions: dict[str, float] = field(default_factory=dict[str, float])
    """Dimensions of the reward by name, the primary one first."""
    tokens: int | None = None
    """Number of tokens in the prompts and completions of its model calls; None if not recorded."""


@dataclass(frozen=True, slots=True)
class EvaluatedTask:
    """A task and its samples."""

    input: Any
    """The task, or its digest in a result that is read from a record."""
    rollouts: tuple[EvaluatedRollout, ...]
    slices: tuple[str, ...] = ()
    """The slices of the task, such as `difficulty=hard`."""
    digest: str = field(default="", compare=False)
    """Digest of the task, the same for equal tasks. The task cannot be read from it."""
    repeat: int | None = field(default=None, compare=False)
    """Number of equal tasks before this one in the dataset; None counts those in the result."""

    @property
    def reward(self) -> float | None:
        """Mean over the samples with a reward; None without any."""
        return _mean(self.rewards)

    @property
    def rewards(self) -> list[float]:
        """Rewards of the samples that have one, without those with an absolute value above 1e15."""
        return [reward for rollout in self.rollouts if (reward := as_reward(rollout.reward)) is not None]


@dataclass(frozen=True, slots=True)
class PassAtK:
    """The probability that at least one of `k` samples of a task succeeds."""

    k: int
    interval: Interval | None
    """Mean over the tasks with its interval; None if no task has enough samples."""
    tasks: int
    """Number of tasks with at least `k` samples that have a reward."""
    left_out: int
    """Number of tasks with fewer samples."""
    threshold: float
    """Reward above which a sample is a success."""


@dataclass(frozen=True, slots=True)
class Variance:
    """Variance components of the rewards. Their square roots are standard deviations."""

    between: float
    """Variance of the mean rewards of tasks. More tasks reduce its effect on the mean."""
    within: float
    """Variance of the samples of one task. More samples of each task reduce only this effect."""


@explain_fields
@dataclass(frozen=True)
class EvaluationResult:
    """The result of `Trainer.evaluate`. `print` shows it as a table."""

    tasks: tuple[EvaluatedTask, ...] = ()
    """Tasks in the order of the dataset, without those skipped by an early stop."""
    seconds: float = 0.0
    """Duration of the evaluation, in seconds."""
    run_id: str | None = None
    """Id of the run of the rollouts; None without a run."""
    place: str = field(default="", compare=False)
    """Store of the rollouts."""
    stopping: Stopping | None = None
    """Result of the sequential test; None without one."""
    left_out: tuple[str, ...] = ()
    """Parts that were too large for the record of this result, such as `slices`."""

    @property
    def rewards(self) -> list[float | None]:
        """Reward of each task, in order; None if no sample has a reward."""
        return [task.reward for task in self.tasks]

    @property
    def rollouts(self) -> list[EvaluatedRollout]:
        """All samples of all tasks."""
        return [rollout for task in self.tasks for rollout in task.rollouts]

    @property
    def n_samples(self) -> int:
        """Maximum number of samples of a task; 0 without tasks."""
        return max((len(task.rollouts) for task in self.tasks), default=0)

    @property
    def outcomes(self) -> dict[str, int]:
        """Number of samples by outcome."""
        return dict(Counter(rollout.outcome for rollout in self.rollouts))

    @property
    def failures(self) -> dict[str, int]:
        """Number of samples without a reward by kind of failure, most frequent first."""
        rollouts = ((r, r.reward is None or as_reward(r.reward) is not None) for r in self.rollouts)
        kinds = (rollout.failure if is_usable else "invalid_reward" for rollout, is_usable in rollouts)
        return dict(Counter(kind for kind in kinds if kind is not None).most_common())

    @property
    def durations(self) -> dict[str, float]:
        """Durations of the samples, in seconds: `median`, `p90`, `longest`; empty without samples."""
        seconds = sorted(rollout.seconds for rollout in self.rollouts)
        if not seconds:
            return {}
        p90 = seconds[max(0, -(-9 * len(seconds) // 10) - 1)]
        return {"median": statistics.median(seconds), "p90": p90, "longest": seconds[-1]}

    @property
    def mean_reward(self) -> float | None:
        """Mean over the tasks with a reward; None without such tasks."""
        return _mean(self._earned)

    @property
    def _earned(self) -> list[float]:
        return [reward for reward in self.rewards if reward is not None]

    def interval(
        self, confidence: float = 0.95, *, method: IntervalMethod | None = None, seed: int = 0
    ) -> Interval | None:
        """Return the mean reward with its confidence interval; None without a task that has a reward.

        The default `method` is Wilson's if all rewards are 0 or 1, otherwise Student's t over the tasks, cut at 0 and 1
        if all rewards are between them. `exact` (Clopper-Pearson) and `bootstrap` (BCa, sampled with `seed`) are
        available by name.

        Raises:
            ValueError: `confidence` is not between 0 and 1, or the method is incompatible with the rewards.
        """
        return interval_of(self._earned, confidence=confidence, method=method, seed=seed)

    def pass_at(self, k: int, *, threshold: float | None = None, confidence: float = 0.95) -> PassAtK:
        """Return the unbiased estimate of the probability that one of `k` samples has a reward above `threshold`.

        A sample without a reward is not a failure. A task with fewer than `k` samples with a reward is excluded and
        counted. Rewards of 0 and 1 need no threshold.

        Source: Chen et al., "Evaluating large language models trained on code", arXiv:2107.03374, equation 1.

        Raises:
            ValueError: No task has `k` samples, `k` or `confidence` is out of range, or graded rewards have no
                threshold.
        """
        check_share("confidence", confidence)
        if not 1 <= k <= max(1, self.n_samples):
            raise ValueError(
                f"pass@{k} requires k from 1 to the samples per task ({self.n_samples}). Use evaluate(n_samples={k})"
            )
        if threshold is None:
            if (graded := self._graded) is not None:
                raise ValueError(f"pass@{k} requires threshold= for rewards other than 0 and 1; got {graded:g}")
            threshold = SUCCESS
        chances: list[float] = []  # of each task with n samples and c successes: 1 - C(n - c, k) / C(n, k)
        for rewards in (task.rewards for task in self.tasks if len(task.rewards) >= k):
            failed = sum(reward <= threshold for reward in rewards)
            chances.append(1.0 - math.comb(failed, k) / math.comb(len(rewards), k))
        interval = interval_of(chances, confidence=confidence)
        return PassAtK(k, interval, len(chances), len(self.tasks) - len(chances), threshold)

    @property
    def _graded(self) -> float | None:
        """A reward other than 0 and 1; None if all are 0 or 1."""
        return next((reward for task in self.tasks for reward in task.rewards if reward not in (0.0, 1.0)), None)

    @property
    def variance(self) -> Variance | None:
        """Variance of the rewards between tasks and between samples of a task. Negative estimates are set to 0.

        None with fewer than two tasks, or if no task has two samples.

        Source: the one-way random-effects analysis of variance for unequal numbers of samples, Searle, Casella and
        McCulloch, Variance Components (1992), chapter 3.
        """
        groups = [rewards for task in self.tasks if (rewards := task.rewards)]
        count, freedom = sum(map(len, groups)), sum(len(group) - 1 for group in groups)
        if len(groups) < 2 or freedom == 0:
            return None
        means = [math.fsum(group) / len(group) for group in groups]
        whole = math.fsum(map(math.fsum, groups)) / count
        within = math.fsum((x - mean) ** 2 for group, mean in zip(groups, means, strict=True) for x in group) / freedom
        spread = math.fsum(len(group) * (mean - whole) ** 2 for group, mean in zip(groups, means, strict=True))
        samples = (count - sum(len(group) ** 2 for group in groups) / count) / (len(groups) - 1)
        return Variance(max(0.0, (spread / (len(groups) - 1) - within) / samples), within)

    @property
    def dimensions(self) -> list[str]:
        """Names of the dimensions of the rewards."""
        return list(dict.fromkeys(name for rollout in self.rollouts for name in rollout.dimensions))

    def dimension(self, name: str) -> EvaluationResult:
        """Return the result with one dimension as the reward, also for interval, slices and comparison.

        Raises:
            ValueError: No reward has this dimension.
        """
        if name not in self.dimensions:
            near = closest_name(name, self.dimensions)
            hint = f"did you mean {near!r}?" if near else f"expected one of: {', '.join(self.dimensions) or '(none)'}"
            raise ValueError(f"no reward has a dimension {name!r}; {hint}")
        samples = ([replace(r, reward=r.dimensions.get(name), dimensions={}) for r in t.rollouts] for t in self.tasks)
        return self._part(replace(task, rollouts=tuple(own)) for task, own in zip(self.tasks, samples, strict=True))

    @property
    def slices(self) -> dict[str, EvaluationResult]:
        """Result of each slice, such as `difficulty=hard`, ordered by name; empty without slices."""
        parts: dict[str, list[EvaluatedTask]] = {}
        for task in self.tasks:
            for name in task.slices:
                parts.setdefault(name, []).append(replace(task, slices=()))
        return {name: self._part(parts[name]) for name in sorted(parts)}

    def _part(self, tasks: Iterable[EvaluatedTask]) -> EvaluationResult:
        """Return a part of the result. It has no verdict of the sequential test, but records that the test was used."""
        stopping = None if self.stopping is None else replace(self.stopping, verdict="no evidence", p_value=1.0)
        return replace(self, tasks=tuple(tasks), stopping=stopping)

    def compare(self, other: EvaluationResult, *, significance: float = 0.05, seed: int = 0) -> PairedComparison:
        """Compare `other` with this result on the same tasks.

        The verdict is `better` or `worse` only if the p-value is below `significance`. The tests are those of
        `compare_rewards`: the exact sign test for rewards of 0 and 1, otherwise the sign-flip permutation test. If a
        result might have been stopped early, the sequential test compares the common tasks.

        Raises:
            ValueError: The tasks differ, or `significance` is not between 0 and 1.
        """
        check_share("significance", significance)
        reward_range = sequential_range(self, other)
        if reward_range is None:
            pairs = self._same_tasks(other)
        elif not (pairs := shared_tasks(self, other)):
            raise ValueError("a paired comparison requires the same tasks; the results have none in common")
        before, after = [early.reward for early, _ in pairs], [late.reward for _, late in pairs]
        return compare_rewards(before, after, significance=significance, seed=seed, stopped_in=reward_range)

    def _same_tasks(self, other: EvaluationResult) -> list[tuple[EvaluatedTask, EvaluatedTask]]:
        if len(self.tasks) != len(other.tasks):
            raise ValueError(
                f"a paired comparison requires the same tasks; got {len(self.tasks)} and {len(other.tasks)}"
            )
        pairs = list(zip(self.tasks, other.tasks, strict=True))
        for number, (mine, its) in enumerate(pairs):
            if mine.input != its.input and digest_of(mine) != digest_of(its):
                raise ValueError(
                    f"a paired comparison requires the same tasks in the same order; task {number} is {mine.input!r} "
                    f"and {its.input!r}"
                )
        return pairs

    @override
    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=100, color_system=None)
        with console.capture() as captured:
            console.print(self)
        return captured.get().rstrip("\n")

    def __rich__(self) -> Any:
        """Return the table for a rich console, without terminal control characters."""
        from rich.table import Table
        from rich.text import Text

        title = f"evaluation: {counted(len(self.tasks), 'task')}, {counted(len(self.rollouts), 'rollout')}"
        table = Table(title=title, title_justify="left", show_header=False)
        for justify in ("left", "right", "left"):
            table.add_column("", justify=justify)
        for row in self._rows():
            table.add_row(*(Text(one_line(cell)) for cell in row))
        return table

    def _rows(self) -> Iterator[_Row]:
        yield self._mean_row("mean reward")
        for name in self.dimensions:
            yield self.dimension(name)._mean_row(f"  {name}")
        for name, part in self.slices.items():
            yield part._mean_row(f"  {name}")
        for k in sorted({1, self.n_samples} if self.n_samples > 1 and self._graded is None else ()):
            pass_at = self.pass_at(k)
            yield self._interval_row(f"pass@{k}", pass_at.interval, pass_at.tasks)
        if (variance := self.variance) is not None:
            within = f"{variance.within**0.5:.3f} within a task, {counted(self.n_samples, 'sample')} each"
            yield "deviation between tasks", f"{variance.between**0.5:.3f}", within
        if self.stopping is not None:
            yield SEQUENTIAL_TEST, self.stopping.verdict, self.stopping.text()
        yield from ((outcome, str(count), "") for outcome, count in sorted(self.outcomes.items()))
        yield from (("  failed", str(count), failure) for failure, count in self.failures.items())
        yield from ((f"{name} time", f"{seconds:.2f} s", "") for name, seconds in self.durations.items())
        yield "total time", f"{self.seconds:.2f} s", f"stored in {self.place}" if self.place else ""

    def _mean_row(self, name: str) -> _Row:
        return self._interval_row(name, self.interval(), len(self._earned))

    def _interval_row(self, name: str, interval: Interval | None, scored: int) -> _Row:
        if interval is None:
            return name, "-", "no task has a reward"
        limits = f"{interval.limits}, " if interval.limits and scored > 1 else ""
        return name, f"{interval.mean:.3f}", f"{limits}{scored} of {counted(len(self.tasks), 'task')}"


def shared_tasks(one: EvaluationResult, other: EvaluationResult) -> list[tuple[EvaluatedTask, EvaluatedTask]]:
    """Return the tasks that both results have, in the order of the first.

    A task that occurs twice counts as two tasks. First occurrences are compared with each other.
    """
    its = dict(_by_place(other))
    return [(task, its[place]) for place, task in _by_place(one) if place in its]


def _by_place(result: EvaluationResult) -> Iterator[tuple[tuple[str, int], EvaluatedTask]]:
    """Yield each task with its digest and the number of equal ones before it."""
    counts = Counter[str]()
    for task in result.tasks:
        digest = digest_of(task)
        yield (digest, counts[digest] if task.repeat is None else task.repeat), task
        counts[digest] += 1


def sequential_range(*results: EvaluationResult) -> tuple[float, float] | None:
    """Return the reward range of the results that a sequential test might have stopped; None without such results.

    A test of a fixed number of tasks is not valid for them, even if they ran all tasks.
    """
    ranges = [result.stopping.reward_range for result in results if result.stopping and not result.stopping.note]
    return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None


def digest_of(task: EvaluatedTask) -> str:
    """Return the digest of an evaluated task, see `tasks_of`."""
    return task.digest or tasks_of([task.input])[0]


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None
