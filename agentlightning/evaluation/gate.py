"""`judge_promotion`: two evaluations of the same tasks held against the rules of promotion."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from agentlightning.errors import BadRequestError, closest_name
from agentlightning.evaluation.intervals import Interval
from agentlightning.evaluation.paired import PairedComparison, compare_rewards
from agentlightning.evaluation.records import TOO_LARGE, too_large
from agentlightning.evaluation.result import EvaluatedTask, EvaluationResult, sequential_range, shared_tasks
from agentlightning.evaluation.rules import PromotionRules
from agentlightning.evaluation.statistics import holm
from agentlightning.field_help import explain_fields
from agentlightning.terminal import cut, one_line

Pair = tuple[EvaluatedTask, EvaluatedTask]
_Compare = Callable[[Sequence[Pair]], PairedComparison]
_OF_ROLLOUTS = ("seconds", "tokens")
_FIGURES = ("reward", *_OF_ROLLOUTS)


@dataclass(frozen=True, slots=True)
class RuleResult:
    """One rule and whether the candidate passes it."""

    rule: str
    """`better`, `significant`, `missing`, `slices`, `floor NAME` or `ceiling NAME`."""
    passed: bool
    reason: str
    """The figure and the limit in words."""


@dataclass(frozen=True, slots=True)
class PartResult:
    """A slice or a dimension of both sides."""

    name: str
    before: Interval | None
    after: Interval | None
    """Means over the tasks that both sides have a reward of; None without any."""
    comparison: PairedComparison
    p_value: float
    """Of a slice: as it counts among all slices (Holm)."""
    worse: bool
    """Whether a rule fails by it."""


@explain_fields
@dataclass(frozen=True)
class Promotion:
    """Whether a candidate is to be promoted, and why; prints as text."""

    promoted: bool
    """All rules are passed."""
    rules: tuple[RuleResult, ...]
    """Each rule, whether it is passed, and why."""
    comparison: PairedComparison
    """The paired test over the tasks that both sides have a reward of."""
    before: Interval | None
    """Mean reward of the baseline over these tasks, with its interval; None without any."""
    after: Interval | None
    """The same of the candidate."""
    slices: tuple[PartResult, ...]
    """The same comparison for each slice."""
    dimensions: tuple[PartResult, ...]
    """The same comparison for each dimension of the reward."""
    pairs: tuple[Pair, ...]
    """The tasks of both sides, the baseline's first."""
    tasks: tuple[int, int]
    """How many each side has."""

    @property
    def reasons(self) -> list[str]:
        """Of each rule that failed; empty if promoted."""
        return [f"{rule.rule}: {rule.reason}" for rule in self.rules if not rule.passed]

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON data, without the tasks; bounds that are not finite are null."""
        parts = {"promoted": self.promoted, "rules": [dataclasses.asdict(rule) for rule in self.rules]}
        parts |= {name: _json(getattr(self, name)) for name in ("comparison", "before", "after")}
        parts |= {name: [_json(part) for part in getattr(self, name)] for name in ("slices", "dimensions")}
        return {**parts, "tasks": {"before": self.tasks[0], "after": self.tasks[1], "shared": len(self.pairs)}}

    @override
    def __str__(self) -> str:
        lines = [f"{'promoted' if self.promoted else 'not promoted'}: {self.comparison}"]
        lines += [f"  {'passed' if rule.passed else 'FAILED'} {rule.rule}: {rule.reason}" for rule in self.rules]
        for part in (*self.dimensions, *self.slices):
            lines.append(
                f"  {one_line(part.name)}: {_mean(part.before)} to {_mean(part.after)}, "
                f"{part.comparison.pairs} pairs, p = {part.p_value:.2g}{', worse' if part.worse else ''}"
            )
        return "\n".join(lines)


def judge_promotion(
    before: EvaluationResult, after: EvaluationResult, rules: PromotionRules | None = None, *, seed: int = 0
) -> Promotion:
    """Return whether what `after` measured is to take the place of what `before` measured.

    Tasks are paired by what they are, whatever their order. Tasks that one side lacks are no pairs; those that the
    candidate lacks or failed count against `max_missing`, except where it was stopped early.

    Raises:
        BadRequestError: they have no task in common, a rule is about a figure that the candidate has not recorded, or a
            reward is too large to be compared.
    """
    rules = rules or PromotionRules()
    for side in (before, after):
        if (value := too_large(side.rollouts)) is not None:
            raise BadRequestError(TOO_LARGE.format(value=value))
    pairs = shared_tasks(before, after)
    if not pairs:
        raise BadRequestError(
            f"a promotion compares the same tasks; of {len(before.tasks)} and {len(after.tasks)} tasks none is on both "
            "sides. Evaluate both on one dataset"
        )
    ranged = sequential_range(before, after)

    def compare(of: Sequence[Pair]) -> PairedComparison:
        mine, its = [early.reward for early, _ in of], [late.reward for _, late in of]
        return compare_rewards(mine, its, significance=rules.significance, seed=seed, stopped_in=ranged)

    whole = compare(pairs)
    slices = _slices(pairs, rules, compare)
    names = [name for name in before.dimensions if name in after.dimensions]
    dimensions = [_part(name, _dimension(before, after, name), compare) for name in names]
    results = [
        _better(whole, rules),
        RuleResult("significant", whole.p_value < rules.significance, _p_reason(whole, rules.significance)),
        _missing(before, pairs, rules, sequential_range(after) is not None),
    ]
    if rules.check_slices:
        results.append(_slice_rule(slices, rules, "slices" in (*before.left_out, *after.left_out)))
    results += [_limit(after, name, limit, True) for name, limit in rules.floors.items()]
    results += [_limit(after, name, limit, False) for name, limit in rules.ceilings.items()]
    sides = _intervals(pairs)
    sizes = len(before.tasks), len(after.tasks)
    promoted = all(rule.passed for rule in results)
    return Promotion(
        promoted, tuple(results), whole, sides[0], sides[1], tuple(slices), tuple(dimensions), tuple(pairs), sizes
    )


# --- rules -----------------------------------------------------------------------------------------------------------


def _better(whole: PairedComparison, rules: PromotionRules) -> RuleResult:
    if whole.difference is None:
        return RuleResult("better", False, "no task has a reward on both sides")
    mean = whole.difference.mean
    told = f"the mean reward changes by {mean:+.4g}; it must rise by more than {rules.min_difference:g}"
    return RuleResult("better", mean > rules.min_difference, told)


def _p_reason(whole: PairedComparison, limit: float) -> str:
    return f"p = {whole.p_value:.2g} over {whole.pairs} pairs ({whole.method}); it must be below {limit:g}"


def _missing(before: EvaluationResult, pairs: Sequence[Pair], rules: PromotionRules, stopped: bool) -> RuleResult:
    """Sum up the samples without a reward; a task that the candidate left out counts whole."""
    counted = [late for early, late in pairs if early.reward is not None]
    earned = len(counted) if stopped else sum(reward is not None for reward in before.rewards)
    missing = earned - math.fsum(len(late.rewards) / len(late.rollouts) for late in counted if late.rollouts)
    share = missing / earned if earned else 0.0
    told = f"{share:.1%} of the candidate's samples on the {earned} tasks that the baseline scored have no reward; "
    return RuleResult("missing", share <= rules.max_missing + 1e-9, f"{told}{rules.max_missing:.1%} at most")


def _slice_rule(slices: Sequence[PartResult], rules: PromotionRules, left_out: bool) -> RuleResult:
    if not slices and left_out:
        told = "the record of an evaluation was too large for its slices; evaluate fewer tasks, or do not check slices"
        return RuleResult("slices", False, told)
    if not slices:
        return RuleResult("slices", True, "the evaluations have no slices")
    worse = [one_line(cut(part.name, 60)) for part in slices if part.worse]
    limit = f"p below {rules.slice_significance:g} among {len(slices)} slices (Holm)"
    if rules.max_slice_drop is not None:
        limit += f", or a mean that falls by more than {rules.max_slice_drop:g}"
    told = f"worse in {', '.join(worse)}" if worse else "none is worse"
    return RuleResult("slices", not worse, f"{told}; worse: {limit}")


def _limit(after: EvaluationResult, name: str, limit: float, floor: bool) -> RuleResult:
    kind = "floor" if floor else "ceiling"
    values: list[float]
    figure, dimension = name.removeprefix("rollout."), name.removeprefix("reward.")
    if name in _OF_ROLLOUTS and name in after.dimensions:
        raise BadRequestError(
            f"{name!r} is a dimension of the candidate's reward and a figure of its rollouts: hold 'reward.{name}' or "
            f"'rollout.{name}' against the {kind}"
        )
    if figure in _OF_ROLLOUTS and name not in after.dimensions:
        found: list[float | None] = [getattr(rollout, figure) for rollout in after.rollouts]
        values = [value for value in found if value is not None]
        values = [] if figure == "seconds" and not any(values) else values
    elif name == "reward" or name in after.dimensions or dimension in after.dimensions:
        side = after if name == "reward" else after.dimension(name if name in after.dimensions else dimension)
        values = [value for value in side.rewards if value is not None]
    else:
        known = [*_FIGURES, *after.dimensions]
        near = closest_name(name, known)
        hint = f"did you mean {near!r}?" if near else f"there are: {', '.join(known)}"
        raise BadRequestError(f"the candidate has no figure {name!r} to hold against a {kind}; {hint}")
    if not values:
        raise BadRequestError(f"the evaluation of the candidate has recorded no {name!r} to hold against a {kind}")
    mean = statistics.fmean(values)
    passed = mean >= limit if floor else mean <= limit
    return RuleResult(f"{kind} {name}", passed, f"mean {mean:.4g}; {'at least' if floor else 'at most'} {limit:g}")


# --- parts -----------------------------------------------------------------------------------------------------------


def _slices(pairs: Sequence[Pair], rules: PromotionRules, compare: _Compare) -> list[PartResult]:
    """Return the slices that either side names, each with its p-value as it counts among all of them."""
    parts: dict[str, list[Pair]] = {}
    for early, late in pairs:
        for name in early.slices or late.slices:
            parts.setdefault(name, []).append((early, late))
    found = [_part(name, parts[name], compare) for name in sorted(parts)]
    adjusted = holm([part.comparison.p_value for part in found])
    return [
        dataclasses.replace(part, p_value=p_value, worse=_is_worse(part, p_value, rules))
        for part, p_value in zip(found, adjusted, strict=True)
    ]


def _part(name: str, pairs: Sequence[Pair], compare: _Compare) -> PartResult:
    comparison = compare(pairs)
    sides = _intervals(pairs)
    return PartResult(name, sides[0], sides[1], comparison, comparison.p_value, False)


def _intervals(pairs: Sequence[Pair]) -> tuple[Interval | None, Interval | None]:
    """Return the mean rewards of both sides, over the tasks that both have a reward of."""
    both = [pair for pair in pairs if pair[0].reward is not None and pair[1].reward is not None]
    early, late = (EvaluationResult(tuple(pair[side] for pair in both)).interval() for side in (0, 1))
    return early, late


def _is_worse(part: PartResult, p_value: float, rules: PromotionRules) -> bool:
    change = part.comparison.difference
    if change is None or change.mean >= 0.0:
        return False
    dropped = rules.max_slice_drop is not None and -change.mean > rules.max_slice_drop
    return p_value < rules.slice_significance or dropped


def _dimension(before: EvaluationResult, after: EvaluationResult, name: str) -> list[Pair]:
    return shared_tasks(before.dimension(name), after.dimension(name))


# --- text ------------------------------------------------------------------------------------------------------------


def _mean(interval: Interval | None) -> str:
    return "-" if interval is None else interval.text()


def _json(value: Any) -> Any:
    """Return a value of dataclasses as JSON data."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {name: _json(item) for name, item in value.items()}  # pyright: ignore[reportUnknownVariableType] -- JSON data
    return None if isinstance(value, float) and not math.isfinite(value) else value
