"""Promotion rules: decide from two evaluations of the same tasks whether a candidate may replace a baseline."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from agentlightning.base.field_help import explain_fields
from agentlightning.base.terminal import counted, cut, one_line
from agentlightning.errors import BadRequestError, closest_name
from agentlightning.evaluation.paired import PairedComparison, compare_rewards
from agentlightning.evaluation.records import why_not_comparable
from agentlightning.evaluation.result import EvaluatedTask, EvaluationResult, sequential_range, shared_tasks
from agentlightning.evaluation.statistics import Interval, check_share, holm

_Pair = tuple[EvaluatedTask, EvaluatedTask]
_Compare = Callable[[Sequence[_Pair]], PairedComparison]
_OF_ROLLOUTS = ("seconds", "tokens")


@explain_fields
@dataclass(frozen=True)
class PromotionRules:
    """The rules for a candidate: by default it must be better with a p-value below 0.05, and not worse in any slice.

    Raises:
        ValueError: A value is out of range or not a finite number.
    """

    min_difference: float = 0.0
    """Difference that the gain in mean reward must exceed, over the tasks with a reward on both sides."""
    significance: float = 0.05
    """Exclusive upper limit for the p-value of the paired test."""
    check_slices: bool = True
    """Whether to require that no slice is worse. A slice is worse if its mean is lower with a p-value below
    `slice_significance`, adjusted for the number of slices (Holm)."""
    slice_significance: float = 0.05
    """Adjusted p-value below which a lower mean of a slice is significant."""
    max_slice_drop: float | None = None
    """Maximum drop of the mean of a slice, even if it is not significant; None for no limit."""
    max_missing: float = 0.05
    """Maximum share of the candidate's samples without a reward, on the tasks that the baseline scored. An error is not
    a low reward, but a candidate must not gain from failing on hard tasks."""
    floors: Mapping[str, float] = field(default_factory=dict[str, float])
    """Minimum mean of a metric of the candidate: `reward`, a dimension of the reward, or the `seconds` or `tokens` of
    rollouts. If a dimension has the name `seconds`, use `reward.seconds` for it and `rollout.seconds` for rollouts."""
    ceilings: Mapping[str, float] = field(default_factory=dict[str, float])
    """Maximum mean of a metric of the candidate, such as a cost. Names are those of `floors`."""

    def __post_init__(self) -> None:
        check_share("significance", self.significance)
        check_share("slice_significance", self.slice_significance)
        for name in ("min_difference", "max_slice_drop"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name}={value} must be 0 or a positive number")
        if not 0.0 <= self.max_missing <= 1.0:
            raise ValueError(f"max_missing={self.max_missing} must be between 0 and 1")
        for name, limit in (*self.floors.items(), *self.ceilings.items()):
            if not math.isfinite(limit):
                raise ValueError(f"the limit of {name!r} must be a finite number; got {limit}")


@dataclass(frozen=True, slots=True)
class RuleResult:
    """The result of one rule."""

    rule: str
    """`better`, `significant`, `missing`, `slices`, `floor NAME` or `ceiling NAME`."""
    passed: bool
    reason: str
    """Measured value and limit, as text."""


@dataclass(frozen=True, slots=True)
class PartResult:
    """The comparison of one slice or one dimension."""

    name: str
    before: Interval | None
    after: Interval | None
    """Means over the tasks with a reward on both sides; None without such tasks."""
    comparison: PairedComparison
    p_value: float
    """P-value of the paired test; for a slice, adjusted for the number of slices (Holm)."""
    worse: bool = False
    """Whether this part makes a rule fail."""


@explain_fields
@dataclass(frozen=True)
class Promotion:
    """The decision whether to promote a candidate, with its reasons. `print` shows it as text."""

    promoted: bool
    """Whether the candidate passes all rules."""
    rules: tuple[RuleResult, ...]
    """The result of each rule."""
    comparison: PairedComparison
    """The paired test over the tasks with a reward on both sides."""
    before: Interval | None
    """Mean reward of the baseline over these tasks, with its interval; None without such tasks."""
    after: Interval | None
    """The same for the candidate."""
    slices: tuple[PartResult, ...]
    """The same comparison for each slice."""
    dimensions: tuple[PartResult, ...]
    """The same comparison for each dimension of the reward."""
    pairs: tuple[_Pair, ...]
    """The tasks of both sides as pairs, the baseline's first."""
    tasks: tuple[int, int]
    """Number of tasks of each side."""

    @property
    def reasons(self) -> list[str]:
        """The reason of each rule that failed; empty if promoted."""
        return [f"{rule.rule}: {rule.reason}" for rule in self.rules if not rule.passed]

    def as_json(self) -> dict[str, Any]:
        """Return the decision as JSON data, without the tasks. Non-finite limits are null."""
        data = _finite(dataclasses.asdict(dataclasses.replace(self, pairs=())))
        del data["pairs"]
        return {**data, "tasks": {"before": self.tasks[0], "after": self.tasks[1], "shared": len(self.pairs)}}

    @override
    def __str__(self) -> str:
        lines = [f"{'promoted' if self.promoted else 'not promoted'}: {self.comparison}"]
        lines += [f"  {'passed' if rule.passed else 'FAILED'} {rule.rule}: {rule.reason}" for rule in self.rules]
        for part in (*self.dimensions, *self.slices):
            before, after = ("-" if side is None else side.text() for side in (part.before, part.after))
            p_value = f"p = {part.p_value:.2g}{', worse' if part.worse else ''}"
            pairs = counted(part.comparison.pairs, "pair")
            lines.append(f"  {one_line(part.name)}: {before} to {after}, {pairs}, {p_value}")
        return "\n".join(lines)


def judge_promotion(
    before: EvaluationResult, after: EvaluationResult, rules: PromotionRules | None = None, *, seed: int = 0
) -> Promotion:
    """Decide whether the candidate measured by `after` should replace the baseline measured by `before`.

    Tasks are paired by content, in any order. Tasks that are missing on one side form no pairs. Tasks that the
    candidate lacks or failed count against `max_missing`, unless its evaluation was stopped early.

    Raises:
        BadRequestError: The evaluations have no common task, a rule uses a metric that the candidate has not recorded,
            or a reward is too large to compare.
    """
    rules = rules or PromotionRules()
    if why := why_not_comparable(before) or why_not_comparable(after):
        raise BadRequestError(why)
    pairs = shared_tasks(before, after)
    if not pairs:
        raise BadRequestError(
            f"the evaluations of {len(before.tasks)} and {counted(len(after.tasks), 'task')} have no task in common. "
            "Evaluate both runs on the same dataset"
        )
    stopped_in = sequential_range(before, after)

    def compare(part: Sequence[_Pair]) -> PairedComparison:
        rewards = [early.reward for early, _ in part], [late.reward for _, late in part]
        return compare_rewards(*rewards, significance=rules.significance, seed=seed, stopped_in=stopped_in)

    whole = _part("", pairs, compare)
    slices = _slices(pairs, rules, compare)
    names = [name for name in before.dimensions if name in after.dimensions]
    by_name = {name: shared_tasks(before.dimension(name), after.dimension(name)) for name in names}
    results = [*_rules_of_reward(whole.comparison, rules), _missing(before, after, pairs, rules.max_missing)]
    if rules.check_slices:
        results.append(_slice_rule(slices, rules, "slices" in (*before.left_out, *after.left_out)))
    results += [_limit(after, "floor", name, limit) for name, limit in rules.floors.items()]
    results += [_limit(after, "ceiling", name, limit) for name, limit in rules.ceilings.items()]
    return Promotion(
        promoted=all(rule.passed for rule in results),
        rules=tuple(results),
        comparison=whole.comparison,
        before=whole.before,
        after=whole.after,
        slices=tuple(slices),
        dimensions=tuple(_part(name, part, compare) for name, part in by_name.items()),
        pairs=tuple(pairs),
        tasks=(len(before.tasks), len(after.tasks)),
    )


def _part(name: str, pairs: Sequence[_Pair], compare: _Compare) -> PartResult:
    scored = [pair for pair in pairs if pair[0].reward is not None and pair[1].reward is not None]
    before, after = (EvaluationResult(tuple(pair[side] for pair in scored)).interval() for side in (0, 1))
    comparison = compare(pairs)
    return PartResult(name, before, after, comparison, comparison.p_value)


def _slices(pairs: Sequence[_Pair], rules: PromotionRules, compare: _Compare) -> list[PartResult]:
    """Return the slices of both sides, with p-values adjusted for the number of slices."""
    pairs_by_name: dict[str, list[_Pair]] = {}
    for early, late in pairs:
        for name in early.slices or late.slices:
            pairs_by_name.setdefault(name, []).append((early, late))
    parts = [_part(name, pairs_by_name[name], compare) for name in sorted(pairs_by_name)]
    slices: list[PartResult] = []
    for part, p_value in zip(parts, holm([part.p_value for part in parts]), strict=True):
        change = 0.0 if part.comparison.difference is None else part.comparison.difference.mean
        dropped = rules.max_slice_drop is not None and -change > rules.max_slice_drop
        worse = change < 0.0 and (p_value < rules.slice_significance or dropped)
        slices.append(dataclasses.replace(part, p_value=p_value, worse=worse))
    return slices


def _rules_of_reward(whole: PairedComparison, rules: PromotionRules) -> tuple[RuleResult, RuleResult]:
    better = RuleResult("better", False, "no task has a reward on both sides")
    if whole.difference is not None:
        mean = whole.difference.mean
        reason = f"the mean reward changes by {mean:+.4g}; the gain must exceed {rules.min_difference:g}"
        better = RuleResult("better", mean > rules.min_difference, reason)
    limit = f"it must be below {rules.significance:g}"
    reason = f"p = {whole.p_value:.2g} over {counted(whole.pairs, 'pair')} ({whole.method}); {limit}"
    return better, RuleResult("significant", whole.p_value < rules.significance, reason)


def _missing(before: EvaluationResult, after: EvaluationResult, pairs: Sequence[_Pair], most: float) -> RuleResult:
    """Count the samples without a reward. A task that the candidate lacks counts fully, unless it was stopped."""
    both = [late for early, late in pairs if early.reward is not None]
    is_whole = sequential_range(after) is None
    scored = sum(reward is not None for reward in before.rewards) if is_whole else len(both)
    missing = scored - math.fsum(len(late.rewards) / len(late.rollouts) for late in both if late.rollouts)
    share = missing / scored if scored else 0.0
    tasks = f"the {counted(scored, 'task')} that the baseline scored"
    reason = f"{share:.1%} of the candidate's samples on {tasks} have no reward; {most:.1%} at most"
    return RuleResult("missing", share <= most + 1e-9, reason)


def _slice_rule(slices: Sequence[PartResult], rules: PromotionRules, left_out: bool) -> RuleResult:
    if not slices and left_out:
        reason = (
            "the record of an evaluation was too large to include slices. Evaluate fewer tasks, or do not check slices"
        )
        return RuleResult("slices", False, reason)
    if not slices:
        return RuleResult("slices", True, "the evaluations have no slices")
    worse = [one_line(cut(part.name, 60)) for part in slices if part.worse]
    limit = f"p below {rules.slice_significance:g} (Holm, {counted(len(slices), 'slice')})"
    if rules.max_slice_drop is not None:
        limit += f", or a drop of the mean by more than {rules.max_slice_drop:g}"
    result = f"worse slices: {', '.join(worse)}" if worse else "no slice is worse"
    return RuleResult("slices", not worse, f"{result}; limit: {limit}")


def _limit(after: EvaluationResult, kind: str, name: str, limit: float) -> RuleResult:
    values = _values(after, kind, name)
    if not values:
        raise BadRequestError(f"the evaluation of the candidate has no recorded {name!r} for the {kind}")
    mean = statistics.fmean(values)
    passed, words = (mean >= limit, "at least") if kind == "floor" else (mean <= limit, "at most")
    reason = f"mean {mean:.4g} of {counted(len(values), 'value')}; {words} {limit:g}"
    return RuleResult(f"{kind} {name}", passed, reason)


def _values(after: EvaluationResult, kind: str, name: str) -> list[float]:
    """Return a metric of the candidate for each rollout or each task."""
    figure, dimensions = name.removeprefix("rollout."), after.dimensions
    if name in _OF_ROLLOUTS and name in dimensions:
        raise BadRequestError(
            f"{name!r} is both a dimension of the candidate's reward and a metric of its rollouts. For the {kind}, use "
            f"'reward.{name}' or 'rollout.{name}'"
        )
    if name == "reward":
        values = after.rewards
    elif name in dimensions or name.removeprefix("reward.") in dimensions:
        values = after.dimension(name if name in dimensions else name.removeprefix("reward.")).rewards
    elif figure in _OF_ROLLOUTS:
        values: list[float | None] = [getattr(rollout, figure) for rollout in after.rollouts]
        if figure == "seconds" and not any(values):  # a record without its samples
            return []
    else:
        figures = ["reward", *_OF_ROLLOUTS, *dimensions]
        near = closest_name(name, figures)
        hint = f"did you mean {near!r}?" if near else f"expected one of: {', '.join(figures)}"
        raise BadRequestError(f"the candidate has no metric {name!r} for the {kind}; {hint}")
    return [value for value in values if value is not None]


def _finite(value: Any) -> Any:
    """Return JSON data with null for each non-finite number."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}  # pyright: ignore[reportUnknownVariableType] -- JSON data
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]  # pyright: ignore[reportUnknownVariableType] -- JSON data
    return None if isinstance(value, float) and not math.isfinite(value) else value
