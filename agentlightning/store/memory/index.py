"""Sorted views of the records in memory, so that the cost of a page by run and status depends only on its size.

A view is created when a query first needs its order, and is kept.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any, cast

from sortedcontainers import SortedList

from agentlightning.store.rules.query import Plan
from agentlightning.store.rules.tx import Record

Key = tuple[float, int, str]
"""(value, number, rollout id): the order within a view."""
Group = tuple["str | None", str]
"""(run, status)"""

_sorted_list = cast("Callable[..., Any]", SortedList)  # its package has no types

ORDERS: dict[str | None, Callable[[Record], float]] = {
    None: lambda record: 0.0,
    "start_time": lambda record: record.rollout.start_time,
    "end_time": lambda record: math.inf if record.rollout.end_time is None else record.rollout.end_time,
}
"""Sort keys of a view. Records with the same key are in the order of insertion."""


class View:
    """All rollouts in one order, in groups by run and status."""

    def __init__(self, order: str | None, records: Iterable[tuple[Record, int]]) -> None:
        self._value = ORDERS[order]
        groups: dict[Group, list[Key]] = defaultdict(list)
        for record, number in records:
            group, key = self._place(record, number)
            groups[group].append(key)
        self._groups = {group: _sorted_list(keys) for group, keys in groups.items()}

    def put(self, previous: Record | None, record: Record, number: int) -> None:
        """Add a rollout, or move it from the place of the `known` record."""
        group, key = self._place(record, number)
        if previous is not None:
            before, old = self._place(previous, number)
            if before == group and old == key:
                return
            self._take_out(before, old)
        keys = self._groups.get(group)
        if keys is None:
            keys = self._groups[group] = _sorted_list()
        keys.add(key)

    def remove(self, record: Record, number: int) -> None:
        """Remove a rollout."""
        self._take_out(*self._place(record, number))

    def _place(self, record: Record, number: int) -> tuple[Group, Key]:
        rollout = record.rollout
        return (rollout.run_id, rollout.status), (self._value(record), number, rollout.rollout_id)

    def _take_out(self, group: Group, key: Key) -> None:
        keys = self._groups[group]
        if keys[0] == key:  # claims take the queue from its front, where no search is needed
            keys.pop(0)
        else:
            keys.remove(key)
        if not keys:
            del self._groups[group]

    def count(self, plan: Plan) -> int:
        """Return the number of matches. The plan filters only by runs, statuses and ends."""
        bound = None if plan.ended_before is None else (plan.ended_before, -1, "")
        return sum(len(keys) if bound is None else keys.bisect_left(bound) for keys in self._chosen(plan))

    def behind(self, plan: Plan) -> Iterator[Key]:
        """Yield the keys after the position where the page begins, in the order of the plan. Ids are not filtered."""
        chosen, descending = self._chosen(plan), plan.descending and plan.sort_by is not None
        begin, end = (-math.inf,), (math.inf, math.inf) if plan.ended_before is None else (plan.ended_before, -1)
        ties: list[Iterator[Key]] = []
        if plan.after is not None:
            value, number = plan.after
            value = (math.inf if value is None else value) if plan.sort_by else 0.0
            begin = (value, number + 1)
            if descending:
                ties = [keys.irange(begin, min(end, (value, math.inf))) for keys in chosen]
                begin, end = (-math.inf,), (value,)
        rest = heapq.merge(*(keys.irange(begin, end, reverse=descending) for keys in chosen), reverse=descending)
        if descending:  # keys of equal value go back into the order of insertion
            ties_of_each_value = itertools.groupby(rest, key=itemgetter(0))
            rest = (key for _, equal in ties_of_each_value for key in sorted(equal))
        return itertools.chain(heapq.merge(*ties), rest)

    def _chosen(self, plan: Plan) -> list[Any]:
        return [
            keys
            for (run_id, status), keys in self._groups.items()
            if (plan.run_id is None or run_id == plan.run_id[0])
            and (plan.status_in is None or plan.any_of or status in plan.status_in)
        ]


def suits(plan: Plan) -> bool:
    """Return True if a view has the order of the plan."""
    if plan.sort_by not in ORDERS or (plan.ids is not None and not plan.any_of):
        return False
    return plan.ended_before is None or plan.sort_by == "end_time"
