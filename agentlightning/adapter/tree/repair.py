"""Moves spans without their parent below the span that was open around them, by time.

Departures from the described system: a span is never moved below one of its own descendants (which lost whole
subtrees), a model call never becomes a parent, and a span without times stays where it is.
"""

from __future__ import annotations

from itertools import islice

from agentlightning.adapter.calls.intervals import Interval, Intervals
from agentlightning.adapter.spans.tokens import response_id
from agentlightning.adapter.tree.node import SpanNode
from agentlightning.semconv import RAW_SPAN, REQUEST_SPAN

_MOST_AROUND = 1024
"""Number of spans examined around one."""


def repair(root: SpanNode) -> None:
    """Move each child of the first fork below the shortest node that covers its full time and is strictly longer.

    The first fork is the first node, going down from `root`, with more than one child. Moved children are appended to
    their new parent; the fork keeps at least one child. No node is lost or added.
    """
    fork = root
    while len(fork.children) == 1:
        fork = fork.children[0]
    _, *below = fork.walk()
    covers = [
        (node, when) for node in below if _may_cover(node) and (when := _interval(node)) and when.end > when.start
    ]
    if not covers:  # a trace of model calls and rewards alone
        return
    intervals = Intervals([when for _, when in covers])
    parents = {id(child): node for node in fork.walk() for child in node.children}
    remaining = len(fork.children)
    stay: list[SpanNode] = []
    for child in fork.children:
        own, target = _interval(child), None
        if own is not None and remaining > 1:
            around = list(islice(intervals.around(own, slack=0.0), _MOST_AROUND))
            around.sort(key=lambda at: (covers[at][1].end - covers[at][1].start, at))
            possible = (covers[at][0] for at in around if covers[at][1] != own)
            target = next((node for node in possible if not _is_below(node, child, parents)), None)
        if target is None:
            stay.append(child)
            continue
        target.children.append(child)
        parents[id(child)] = target
        remaining -= 1
    fork.children[:] = stay


def _interval(node: SpanNode) -> Interval | None:
    start, end = node.start_time, node.end_time
    return None if start is None or end is None else Interval(start, end)


def _may_cover(node: SpanNode) -> bool:
    """True if other spans may belong below a span: it is no model call."""
    return node.span.name not in (RAW_SPAN, REQUEST_SPAN) and response_id(node.span) is None


def _is_below(node: SpanNode, ancestor: SpanNode, parents: dict[int, SpanNode]) -> bool:
    at: SpanNode | None = node
    while at is not None and at is not ancestor:
        at = parents.get(id(at))
    return at is ancestor
