"""Statistics of rollouts by group: the plan of a call, the counts of each group, and the result."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter, mul
from typing import Any, Final, get_args

from agentlightning.errors import BadRequestError
from agentlightning.store.summaries.facts import Facts, task_of
from agentlightning.store.summaries.plan import Entry, filter_of, matching
from agentlightning.types import AggregateBy, AggregateGroup, RolloutAggregate, RolloutFilter

GROUPED: Final[tuple[str, ...]] = get_args(AggregateBy)
MOST_BUCKETS: Final = 100
_LONGEST_NAME = 512
COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    **{name: (name,) for name in ("step", "outcome", "status", "mode", "task")},
    "resources": ("resources_id", "resources_version"),
    "worker": ("worker_id",),
    "none": (),
}
"""The facts that all rollouts of a group have in common."""


@dataclass(frozen=True, slots=True)
class AggregatePlan:
    """The filter and grouping of rollouts, and the value for the statistics."""

    by: AggregateBy = "step"
    chosen: RolloutFilter = field(default_factory=RolloutFilter)
    buckets: int = 0
    dimension: str | None = None
    """The dimension of the reward; None for the reward itself."""

    @classmethod
    def of(cls, by: Any, chosen: RolloutFilter | None, buckets: int, dimension: str | None) -> AggregatePlan:
        """Return the plan of a call.

        Raises:
            BadRequestError: an argument is wrong.
        """
        if by not in GROUPED:
            raise BadRequestError(f"Rollouts cannot be grouped by {by!r}; expected one of {', '.join(GROUPED)}")
        if type(buckets) is not int or not 0 <= buckets <= MOST_BUCKETS:
            raise BadRequestError(f"buckets must be an integer from 0 to {MOST_BUCKETS}; got {buckets!r}")
        if dimension is not None and (type(dimension) is not str or len(dimension) > _LONGEST_NAME):
            raise BadRequestError(
                f"dimension must be the name of a reward's dimension, of at most {_LONGEST_NAME} characters; "
                f"got {str(dimension)[:60]!r}"
            )
        return cls(by, filter_of(chosen), buckets, dimension)


@dataclass(slots=True)
class Tally:
    """The counts of one group."""

    key: tuple[Any, ...]
    """The values of its `COLUMNS`."""
    count: int = 0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    seconds: float = 0.0
    """Total duration of the ended rollouts in seconds."""
    ended: int = 0
    first: float = math.inf
    last: float = -math.inf
    rewards: Sequence[float] = ()
    """Rewards in ascending order."""

    def add(self, outcome: str | None, count: int, seconds: float, ended: int, first: float, last: float) -> None:
        """Add a number of rollouts of the group with this outcome."""
        self.count += count
        if outcome is not None:
            self.outcomes[outcome] += count
        self.seconds += seconds
        self.ended += ended
        self.first, self.last = min(self.first, first), max(self.last, last)


def aggregate_entries(entries: Iterable[Entry], plan: AggregatePlan) -> RolloutAggregate:
    """Return statistics of all rollouts of a store without a table of their facts."""
    by, dimension = plan.by, plan.dimension
    groups: dict[Any, list[Facts]] = {}
    columns = [Facts._fields.index(name) for name in COLUMNS[by]]
    key_of: Callable[[Facts], Any] = itemgetter(*columns) if columns else _nothing
    for each in (entry.facts for entry in matching(entries, plan.chosen)):
        key = key_of(each)
        if key in groups:
            groups[key].append(each)
        else:
            groups[key] = [each]
    single = len(columns) == 1
    return aggregate_of(plan, [_tallied((key,) if single else key, facts, dimension) for key, facts in groups.items()])


def _nothing(_: Facts) -> tuple[()]:
    return ()


_START, _END, _OUTCOME, _REWARD = (Facts._fields.index(n) for n in ("start_time", "end_time", "outcome", "reward"))


def _tallied(key: tuple[Any, ...], facts: list[Facts], dimension: str | None) -> Tally:
    outcomes = Counter(map(itemgetter(_OUTCOME), facts))
    outcomes.pop(None, None)
    starts: list[float] = list(map(itemgetter(_START), facts))
    ends: list[float | None] = list(map(itemgetter(_END), facts))
    seconds = [end - start for start, end in zip(starts, ends, strict=True) if end is not None]
    if dimension is None:
        rewards = [reward for reward in map(itemgetter(_REWARD), facts) if reward is not None]
    else:
        rewards = dimension_values((each.rewards for each in facts), dimension)
    rewards.sort()
    total = math.fsum(seconds)
    return Tally(key, len(facts), outcomes, total, len(seconds), min(starts), max(starts), rewards)


def dimension_values(texts: Iterable[str | None], dimension: str) -> list[float]:
    """Return the values of a dimension in the rewards (as JSON) that have it."""
    values = [json.loads(text).get(dimension) for text in texts if text is not None]
    return [value for value in values if value is not None]


def aggregate_of(plan: AggregatePlan, tallies: Iterable[Tally]) -> RolloutAggregate:
    """Return the result of a plan from the counts of its groups."""
    counted = [tally for tally in tallies if tally.count]
    edges = _edges([tally.rewards for tally in counted if tally.rewards], plan.buckets)
    groups = [_group(plan.by, tally, edges) for tally in counted]
    groups.sort(key=lambda group: _order(group.key))
    return RolloutAggregate(by=plan.by, groups=groups, bucket_edges=edges)


def _order(key: int | str | None) -> tuple[int, Any]:
    return (2, 0) if key is None else (1, key) if isinstance(key, str) else (0, key)


def _edges(rewards: list[Sequence[float]], buckets: int) -> list[float]:
    if not buckets or not rewards:
        return []
    low, high = min(each[0] for each in rewards), max(each[-1] for each in rewards)
    if low == high:
        low, high = low - 0.5, high + 0.5
    inner = [low + (high / buckets - low / buckets) * index for index in range(1, buckets)]
    return [low, *inner, high]


def _group(by: str, tally: Tally, edges: list[float]) -> AggregateGroup:
    rewards, n = tally.rewards, len(tally.rewards)
    mean, error = _mean_and_error(rewards)
    quantiles = [quantile(rewards, part) if n else None for part in (0.1, 0.25, 0.5, 0.75, 0.9)]
    buckets = _buckets(rewards, edges)
    return AggregateGroup(
        key=_key(by, tally.key),
        count=tally.count,
        scored=n,
        mean=mean,
        stderr=error,
        minimum=rewards[0] if n else None,
        maximum=rewards[-1] if n else None,
        **dict(zip(("p10", "p25", "p50", "p75", "p90"), quantiles, strict=True)),
        outcomes=dict(sorted(tally.outcomes.items())),
        buckets=buckets,
        seconds_mean=tally.seconds / tally.ended if tally.ended else None,
        first_time=tally.first,
        last_time=tally.last,
    )


def _mean_and_error(rewards: Sequence[float]) -> tuple[float | None, float | None]:
    n = len(rewards)
    if not n:
        return None, None
    try:
        mean = math.fsum(rewards) / n
        differences = [reward - mean for reward in rewards]
        return mean, math.sqrt(math.fsum(map(mul, differences, differences)) / (n - 1) / n) if n > 1 else None
    except OverflowError:  # of rewards near the largest number
        return math.fsum(reward / n for reward in rewards), None


def _buckets(rewards: Sequence[float], edges: list[float]) -> list[int]:
    if not edges:
        return []
    places = [0, *(bisect_left(rewards, edge) for edge in edges[1:-1]), len(rewards)]
    return [end - begin for begin, end in pairwise(places)]


def quantile(ordered: Sequence[float], part: float) -> float:
    """Return the quantile `part` of sorted values, interpolated between the two nearest values."""
    place = part * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    left, right = ordered[below], ordered[above]
    return left if left == right else left * (1 - (place - below)) + right * (place - below)


def _key(by: str, key: tuple[Any, ...]) -> int | str | None:
    if by == "none":
        return None
    if by == "task":
        return task_of(key[0])
    if by == "resources":
        resources_id, version = key
        return None if resources_id is None else resources_id if version is None else f"{resources_id}@{version}"
    return key[0]
