"""The result of an evaluation: rewards and outcomes by task, figures with their intervals, and a paired comparison.

A task's reward is the mean of its samples that earned one. A fault is not a low reward: a task none of whose samples
earned anything has none, is left out of the mean, and is counted among the failures. Intervals and tests take tasks as
what was drawn, not samples: those of one task are alike (Miller, "Adding error bars to evals", arXiv:2411.00640).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import override

from agentlightning.errors import closest_name
from agentlightning.evaluation.betting import Stopping
from agentlightning.evaluation.intervals import Interval, IntervalMethod, interval_of
from agentlightning.evaluation.paired import PairedComparison, compare_rewards
from agentlightning.evaluation.sampling import PassAtK, Variance, pass_at_k, variance_components
from agentlightning.evaluation.statistics import check_share
from agentlightning.evaluation.table import Row, as_text, mean_row, table_of
from agentlightning.evaluation.tasks import tasks_of
from agentlightning.field_help import explain_fields
from agentlightning.utils.rewards import as_reward

SCORED = ("scored", "policy_fault")
"""Outcomes that count with their reward."""
SUCCESS = 0.5
"""A sample succeeds if its reward is above this, where rewards are 0 and 1."""


@dataclass(frozen=True, slots=True)
class EvaluatedRollout:
    """One sample of one task."""

    rollout_id: str
    outcome: str
    """Outcome of the latest attempt; the status of the rollout where nobody claimed it."""
    reward: float | None
    seconds: float
    """Duration of the latest attempt, from claim to end; 0 where nobody claimed it."""
    failure: str | None = None
    """The class of the exception, else the reason in a word; None if it earned a reward."""
    dimensions: dict[str, float] = field(default_factory=dict[str, float])
    """The dimensions of a reward by name, the primary one first."""
    tokens: int | None = None
    """Tokens of the prompts and answers of its model calls; None where nobody recorded them."""


@dataclass(frozen=True, slots=True)
class EvaluatedTask:
    """A task and its samples."""

    input: Any
    """The task; its digest in a result that was read from a record."""
    rollouts: tuple[EvaluatedRollout, ...]
    slices: tuple[str, ...] = ()
    """The slices that it belongs to, such as `difficulty=hard`."""
    digest: str = field(default="", compare=False)
    """The same for equal tasks; the task cannot be read from it."""
    repeat: int | None = field(default=None, compare=False)
    """Number of equal tasks before it in the dataset; None: as many as in the result."""

    @property
    def reward(self) -> float | None:
        """Mean over the samples that earned something; None without any."""
        earned = self.rewards
        return statistics.fmean(earned) if earned else None

    @property
    def rewards(self) -> list[float]:
        """Rewards of the samples that have one; not those of more than 1e15 in size."""
        return [reward for rollout in self.rollouts if (reward := as_reward(rollout.reward)) is not None]

    def is_same(self, other: EvaluatedTask) -> bool:
        """Return whether both are of one task."""
        if self.input == other.input:
            return True
        mine, its = (task.digest or tasks_of([task.input])[0] for task in (self, other))
        return mine == its


@explain_fields
@dataclass(frozen=True)
class EvaluationResult:
    """The result of `Trainer.evaluate`; prints as a table."""

    tasks: tuple[EvaluatedTask, ...] = ()
    """In the order of the dataset; without those that stopping early saved."""
    seconds: float = 0.0
    """Duration of the whole evaluation."""
    run_id: str | None = None
    """The run that its rollouts belong to; None if it made none."""
    place: str = field(default="", compare=False)
    """The store of its rollouts."""
    stopping: Stopping | None = None
    """The verdict of the sequential test; None without one."""
    left_out: tuple[str, ...] = ()
    """Parts that did not fit into the record that it was read from, such as `slices`."""

    @property
    def rewards(self) -> list[float | None]:
        """Reward of each task, in order; None where no sample has one."""
        return [task.reward for task in self.tasks]

    @property
    def rollouts(self) -> list[EvaluatedRollout]:
        """Every sample of every task."""
        return [rollout for task in self.tasks for rollout in task.rollouts]

    @property
    def n_samples(self) -> int:
        """Samples of each task, the most of any; 0 without tasks."""
        return max((len(task.rollouts) for task in self.tasks), default=0)

    @property
    def outcomes(self) -> dict[str, int]:
        """Samples by outcome."""
        return dict(Counter(rollout.outcome for rollout in self.rollouts))

    @property
    def failures(self) -> dict[str, int]:
        """Samples that earned nothing, by the kind of their failure, the most frequent first."""
        unusable = (r.reward is not None and as_reward(r.reward) is None for r in self.rollouts)
        kinds = ("invalid_reward" if bad else r.failure for r, bad in zip(self.rollouts, unusable, strict=True))
        return dict(Counter(kind for kind in kinds if kind is not None).most_common())

    @property
    def mean_reward(self) -> float | None:
        """Mean over the tasks that have a reward; None without any."""
        earned = [reward for reward in self.rewards if reward is not None]
        return statistics.fmean(earned) if earned else None

    def interval(
        self, confidence: float = 0.95, *, method: IntervalMethod | None = None, seed: int = 0
    ) -> Interval | None:
        """Return the mean reward with its confidence interval; None without a task that has a reward.

        Without a `method`: Wilson's for rewards that are all 0 or 1, else Student's t over the tasks. `exact`
        (Clopper-Pearson) and `bootstrap` (BCa, drawn with `seed`) are taken by name.

        Raises:
            ValueError: `confidence` is not between 0 and 1, or the method does not fit the rewards.
        """
        check_share("confidence", confidence)
        earned = [reward for reward in self.rewards if reward is not None]
        return interval_of(earned, confidence=confidence, method=method, seed=seed)

    @property
    def durations(self) -> dict[str, float]:
        """Seconds that the samples took: `median`, `p90`, `longest`; empty without samples."""
        seconds = sorted(rollout.seconds for rollout in self.rollouts)
        if not seconds:
            return {}
        ninth = seconds[max(0, -(-9 * len(seconds) // 10) - 1)]
        return {"median": statistics.median(seconds), "p90": ninth, "longest": seconds[-1]}

    # --- several samples, several rewards, parts -------------------------------------------------------------------

    def pass_at(self, k: int, *, threshold: float | None = None, confidence: float = 0.95) -> PassAtK:
        """Return the chance that one of `k` samples of a task has a reward above `threshold`, estimated without bias.

        A sample without a reward is no failure; a task with less than `k` others is left out and counted. Rewards of 0
        and 1 need no threshold.

        Raises:
            ValueError: no task has `k` samples, `k` or `confidence` is out of range, or graded rewards have no
                threshold.
        """
        check_share("confidence", confidence)
        if not 1 <= k <= max(1, self.n_samples):
            raise ValueError(
                f"pass@{k} needs k between 1 and the {self.n_samples} samples of each task; "
                f"give evaluate() n_samples={k}"
            )
        if threshold is None:
            if (graded := self._graded) is not None:
                raise ValueError(f"pass@{k} of rewards such as {graded:g} needs threshold=; without it they are 0 or 1")
            threshold = SUCCESS
        enough = [task.rewards for task in self.tasks if len(task.rewards) >= k]
        shares = [pass_at_k(len(earned), sum(reward > threshold for reward in earned), k) for earned in enough]
        interval = interval_of(shares, confidence=confidence)
        return PassAtK(k, interval, len(enough), len(self.tasks) - len(enough), threshold)

    @property
    def _graded(self) -> float | None:
        """A reward other than 0 and 1; None if there is none."""
        return next((reward for task in self.tasks for reward in task.rewards if reward not in (0.0, 1.0)), None)

    @property
    def variance(self) -> Variance | None:
        """Variance of the rewards between tasks and between samples of a task; None where no task has two samples."""
        return variance_components([task.rewards for task in self.tasks])

    @property
    def dimensions(self) -> list[str]:
        """Names of the dimensions of the rewards."""
        return list(dict.fromkeys(name for rollout in self.rollouts for name in rollout.dimensions))

    def dimension(self, name: str) -> EvaluationResult:
        """Return the result with one dimension as the reward; its interval, slices and comparison are that one's.

        Raises:
            ValueError: no reward has it.
        """
        if name not in self.dimensions:
            near = closest_name(name, self.dimensions)
            hint = f"did you mean {near!r}?" if near else f"there are: {', '.join(self.dimensions) or 'none'}"
            raise ValueError(f"no reward has a dimension {name!r}; {hint}")
        return self._part(
            replace(
                task,
                rollouts=tuple(replace(r, reward=r.dimensions.get(name), dimensions={}) for r in task.rollouts),
            )
            for task in self.tasks
        )

    def _part(self, tasks: Iterable[EvaluatedTask]) -> EvaluationResult:
        """Return a part, about which the sequential test has no verdict; that there was one still counts."""
        stopping = None if self.stopping is None else replace(self.stopping, verdict="no evidence", p_value=1.0)
        return replace(self, tasks=tuple(tasks), stopping=stopping)

    @property
    def slices(self) -> dict[str, EvaluationResult]:
        """The result of each slice, such as `difficulty=hard`, in the order of their names; empty without slices."""
        parts: dict[str, list[EvaluatedTask]] = {}
        for task in self.tasks:
            for name in task.slices:
                parts.setdefault(name, []).append(replace(task, slices=()))
        return {name: self._part(parts[name]) for name in sorted(parts)}

    # --- comparison --------------------------------------------------------------------------------------------------

    def compare(self, other: EvaluationResult, *, significance: float = 0.05, seed: int = 0) -> PairedComparison:
        """Return whether `other` is better than this one on the same tasks.

        The verdict is `better` or `worse` only if the p-value is below `significance`. The test is exact for rewards of
        0 and 1 (McNemar) and for few tasks; for many graded rewards signs of differences are drawn with `seed`. Where
        one of them might have been stopped early, the tasks that both have are compared, by the sequential test.

        Raises:
            ValueError: the tasks differ, or `significance` is not between 0 and 1.
        """
        check_share("significance", significance)
        ranged = sequential_range(self, other)
        if ranged is None:
            self._check_same_tasks(other)
            mine, its = self.rewards, other.rewards
        else:
            pairs = shared_tasks(self, other)
            if not pairs:
                raise ValueError("a paired comparison needs the same tasks; the two have none in common")
            mine, its = [early.reward for early, _ in pairs], [late.reward for _, late in pairs]
        return compare_rewards(mine, its, significance=significance, seed=seed, stopped_in=ranged)

    def _check_same_tasks(self, other: EvaluationResult) -> None:
        if len(self.tasks) != len(other.tasks):
            raise ValueError(
                f"a paired comparison needs the same tasks: {len(self.tasks)} here, {len(other.tasks)} there"
            )
        for number, (mine, its) in enumerate(zip(self.tasks, other.tasks, strict=True)):
            if not mine.is_same(its):
                raise ValueError(
                    f"a paired comparison needs the same tasks in the same order: task {number} is {mine.input!r} here "
                    f"and {its.input!r} there"
                )

    @override
    def __str__(self) -> str:
        return as_text(self)

    def __rich__(self) -> Any:
        """Return the table that a rich console prints."""
        return table_of(f"evaluation: {len(self.tasks)} tasks, {len(self.rollouts)} rollouts", self._rows())

    def _rows(self) -> Iterator[Row]:
        yield self._mean_row("mean reward")
        for name in self.dimensions:
            yield self.dimension(name)._mean_row(f"  {name}")
        for name, part in self.slices.items():
            yield part._mean_row(f"  {name}")
        for k in sorted({1, self.n_samples} if self.n_samples > 1 and self._graded is None else ()):
            pass_at = self.pass_at(k)
            yield mean_row(f"pass@{k}", pass_at.interval, pass_at.tasks, len(self.tasks))
        if (variance := self.variance) is not None:
            within = f"within {variance.within**0.5:.3f}, of {self.n_samples} samples each"
            yield "deviation between tasks", f"{variance.between**0.5:.3f}", within
        if self.stopping is not None:
            yield "sequential test", self.stopping.verdict, self.stopping.text()
        yield from ((outcome, str(count), "") for outcome, count in sorted(self.outcomes.items()))
        yield from (("  failed", str(count), failure) for failure, count in self.failures.items())
        yield from ((f"{name} time", f"{seconds:.2f} s", "") for name, seconds in self.durations.items())
        yield "whole time", f"{self.seconds:.2f} s", f"kept in {self.place}" if self.place else ""

    def _mean_row(self, name: str) -> Row:
        return mean_row(name, self.interval(), sum(reward is not None for reward in self.rewards), len(self.tasks))


def shared_tasks(one: EvaluationResult, other: EvaluationResult) -> list[tuple[EvaluatedTask, EvaluatedTask]]:
    """Return the tasks that both have, in the order of the first; one that is there twice is two tasks, of which the
    first is compared with the first."""
    its = dict(_by_place(other))
    return [(task, its[place]) for place, task in _by_place(one) if place in its]


def _by_place(result: EvaluationResult) -> Iterator[tuple[tuple[str, int], EvaluatedTask]]:
    """Yield each task with its digest and the number of equal ones before it."""
    seen = Counter[str]()
    for task in result.tasks:
        digest = _digest(task)
        yield (digest, seen[digest] if task.repeat is None else task.repeat), task
        seen[digest] += 1


def sequential_range(*results: EvaluationResult) -> tuple[float, float] | None:
    """Return the range of rewards of those that a sequential test might have stopped; None if there is none.

    A test of a fixed number of tasks is not valid for them, even if they ran all tasks.
    """
    ranges = [result.stopping.reward_range for result in results if result.stopping and not result.stopping.note]
    return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None


def _digest(task: EvaluatedTask) -> str:
    return task.digest or tasks_of([task.input])[0]
