"""Moves spans without their parent below the span that was open around them, by time.

Departures from the described system: a span is never moved below one of its own descendants (there whole subtrees
vanished), a model call never becomes a parent, a span without times stays where it is, and the work grows with n log n.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from agentlightning.adapter.spans.tokens import response_id
from agentlightning.adapter.tree.node import SpanNode
from agentlightning.semconv import RAW_SPAN, REQUEST_SPAN
from agentlightning.types import Span

NodeT = TypeVar("NodeT", bound=SpanNode)


class _Interval(NamedTuple):
    start: float
    end: float
    order: int
    """Place in the tree, parents first; of equally tight intervals the first one is taken."""


def repair(root: SpanNode) -> None:
    """Move each child of the first fork below the tightest node that covers its whole time and is strictly longer.

    The first fork is the first node, going down from `root`, with more than one child. Moved children are appended to
    their new parent; the fork keeps at least one child. No node is lost or added.
    """
    fork = root
    while len(fork.children) == 1:
        fork = fork.children[0]
    _, *below = fork.walk()
    possible = [_may_cover(node.span) for node in below]
    if not any(possible):  # a trace of model calls and rewards alone
        return
    covers = _Covers(below, possible, asked=fork.children)
    parents = {id(child): node for node in fork.walk() for child in node.children}
    remaining = len(fork.children)
    stay: list[SpanNode] = []
    for child in list(fork.children):
        target = None if remaining == 1 else covers.tightest(child)
        if target is not None and _is_below(target, child, parents):
            target = next((node for node in covers.by_tightness(child) if not _is_below(node, child, parents)), None)
        if target is None:
            stay.append(child)
            continue
        target.add_child(child)
        parents[id(child)] = target
        remaining -= 1
    fork.children[:] = stay


def _may_cover(span: Span) -> bool:
    """True if other spans may belong below a span: it is no model call, and no moment such as that of a reward."""
    start, end = span.start_time, span.end_time
    is_long = start is not None and end is not None and end > start
    return is_long and span.name not in (RAW_SPAN, REQUEST_SPAN) and response_id(span) is None


def _is_below(node: NodeT, ancestor: NodeT, parents: dict[int, NodeT]) -> bool:
    at: NodeT | None = node
    while at is not None and at is not ancestor:
        at = parents.get(id(at))
    return at is ancestor


class _Covers(Generic[NodeT]):
    """Answers which node covers a child most tightly, for all children in one sweep over the start times."""

    def __init__(self, nodes: Sequence[NodeT], possible: Sequence[bool], asked: Sequence[NodeT]) -> None:
        timed = [(node, interval) for order, node in enumerate(nodes) if (interval := _interval(node, order))]
        self._own = {id(node): interval for node, interval in timed}
        self._nodes = {interval.order: node for node, interval in timed}
        self._possible = [interval for _, interval in timed if possible[interval.order]]
        self._answers: dict[tuple[float, float], int] = {}
        """For each asked pair of times, the order of the shortest possible interval around it that is longer."""
        sorted_possible = sorted(self._possible)
        starts = [interval.start for interval in sorted_possible]
        ends = sorted({interval.end for interval in sorted_possible})
        earlier = _SuffixMinimum(len(ends))
        added = 0
        for own in sorted(self._own[id(node)] for node in asked if id(node) in self._own):
            if (own.start, own.end) in self._answers:
                continue
            same_start = bisect_left(starts, own.start)
            for interval in sorted_possible[added:same_start]:
                earlier.add(bisect_left(ends, interval.end), (interval.end - interval.start, interval.order))
            added = same_start
            best = earlier.minimum(bisect_left(ends, own.end))
            after = bisect_right(starts, own.start)
            later = bisect_right(sorted_possible, own.end, same_start, after, key=lambda other: other.end)
            if later < after:
                other = sorted_possible[later]
                begun_alike = (other.end - other.start, other.order)
                best = min(best, begun_alike) if best else begun_alike
            if best is not None:
                self._answers[own.start, own.end] = best[1]

    def tightest(self, child: NodeT) -> NodeT | None:
        own = self._own.get(id(child))
        order = None if own is None else self._answers.get((own.start, own.end))
        return None if order is None else self._nodes[order]

    def by_tightness(self, child: NodeT) -> Iterator[NodeT]:
        own = self._own[id(child)]
        covering = [
            (other.end - other.start, other.order)
            for other in self._possible
            if other.start <= own.start and other.end >= own.end and other[:2] != own[:2]
        ]
        return (self._nodes[order] for _, order in sorted(covering))


class _SuffixMinimum:
    """A Fenwick tree: the least value among all places at or after one, each step in log n."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._least: list[tuple[float, int] | None] = [None] * (size + 1)

    def add(self, place: int, value: tuple[float, int]) -> None:
        at = self._size - place
        while at <= self._size:
            least = self._least[at]
            if least is None or value < least:
                self._least[at] = value
            at += at & -at

    def minimum(self, place: int) -> tuple[float, int] | None:
        best: tuple[float, int] | None = None
        at = self._size - place
        while at > 0:
            least = self._least[at]
            if least is not None and (best is None or least < best):
                best = least
            at -= at & -at
        return best


def _interval(node: SpanNode, order: int) -> _Interval | None:
    if node.start_time is None or node.end_time is None:
        return None
    return _Interval(node.start_time, node.end_time, order)
