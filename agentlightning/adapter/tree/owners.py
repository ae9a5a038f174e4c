"""The owner of a model call: the names of the agents that it may belong to.

Recorded names count first: the agent that the span of a call names, or that of the nearest span above it, by the
recorded parents; then the same for the span that the call's request named. A span without an agent above it, and a call
that only the gateway recorded, belong to the agents whose spans contain them in time. More than one name means that the
agent of the call is uncertain.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import islice
from typing import Final, NamedTuple

from agentlightning.adapter.calls.intervals import Interval, Intervals, narrowed
from agentlightning.adapter.calls.matching import CallSpans
from agentlightning.adapter.tree.node import SpanNode
from agentlightning.semconv import RAW_SPAN, REQUEST_SPAN
from agentlightning.types import Span

NOBODY: Final = ""
"""Placeholder among names for code outside of every agent."""
_MOST_AROUND: Final = 256
"""Number of agents' spans examined around one call; with more of them the call has no name."""


class Owner(NamedTuple):
    """The agents that a call may belong to."""

    names: frozenset[str]
    """One name if it is certain; several if it is uncertain; empty if there was no agent."""
    branch: str
    """Id of the agent's span, otherwise of the root."""

    @property
    def name(self) -> str | None:
        """The only name, if there is one."""
        (name,) = self.names if len(self.names) == 1 else (NOBODY,)
        return name or None


class Owners:
    """The owners of the calls of a tree. With `by_time`, times are used if spans name no agent."""

    def __init__(self, root: SpanNode, by_time: bool) -> None:
        self._root = root
        self._nodes = {node.id: node for node in root.walk()}
        self._by_time = by_time
        self._stated: dict[str, Owner | None] = {}
        self._nobody = Owner(frozenset(), root.id)

    def of(self, call: CallSpans) -> Owner:
        """Return the owner of a call."""
        nodes = [self._nodes[span.span_id] for span in call.certain if span.span_id in self._nodes]
        client = None if call.client is None else self._nodes.get(call.client.span_id)
        stated = [self._of_node(node) for node in nodes]
        stated += [] if client is None else [_agent_of(client) or self._of_node(client)]
        if (certain := next(filter(None, stated), None)) is not None:
            return certain
        for spans, may_be_none in call.unsure:
            owners = self._owners(spans)
            if not may_be_none and len(_names(owners)) == 1:
                return owners[0]
        gateway = call.request or call.record
        own_nodes = nodes or [self._nodes[each.span_id] for each in (gateway,) if each and each.span_id in self._nodes]
        owner = next((owner for node in own_nodes if (owner := self._around(node)).names), self._nobody)
        unsure = [owner for spans, _ in call.unsure for owner in self._owners(spans)]
        return owner if nodes else owner._replace(names=owner.names | _names(unsure))

    def _owners(self, spans: Iterable[Span]) -> list[Owner]:
        nodes = (self._nodes[span.span_id] for span in spans if span.span_id in self._nodes)
        return [self._of_node(node) or self._around(node) for node in nodes]

    def _of_node(self, node: SpanNode) -> Owner | None:
        """Return the agent that a span of a call states; None if it states none."""
        above, own = self._stated_by(node.span.parent_id), node.own_agent_name()
        if own is None or (above is not None and own in above.names):
            return above
        return Owner(frozenset((own,)), node.id if above is None else above.branch)

    def _stated_by(self, id: str | None) -> Owner | None:
        """Return the agent of a span or the nearest one above it; `NOBODY` within agents without a name only."""
        path: list[SpanNode] = []
        while id is not None and id in self._nodes and id not in self._stated:
            self._stated[id] = None  # also ends the walk where spans are their own ancestors
            path.append(self._nodes[id])
            id = self._nodes[id].span.parent_id
        above = None if id is None else self._stated.get(id)
        for node in reversed(path):
            nameless = Owner(frozenset((NOBODY,)), node.id) if node.is_of_agent() else None
            above = self._stated[node.id] = _agent_of(node) or above or nameless
        return above

    def _around(self, node: SpanNode) -> Owner:
        """Return the agents whose spans lie around a span in time."""
        span = node.span
        if not self._by_time or span.start_time is None or span.end_time is None:
            return self._nobody
        owners, intervals, tree = self._agents
        own = Interval(span.start_time, span.end_time)
        around = list(islice(tree.around(own), _MOST_AROUND + 1)) if owners else []
        if span.name not in (RAW_SPAN, REQUEST_SPAN):  # by the clock of the agents' spans
            around = [at for at in around if intervals[at].holds(own, 0.0)]
        names = _names(owners[at] for at in around)
        if len(names) > 1:
            around = narrowed(own, around, intervals)
            names = _names(owners[at] for at in around)
        if not around:
            return self._nobody
        if len(around) > _MOST_AROUND:
            names |= {NOBODY}
        tightest = min(around, key=lambda at: intervals[at].end - intervals[at].start)
        return Owner(names, owners[tightest].branch if len(names) == 1 else self._root.id)

    @cached_property
    def _agents(self) -> tuple[list[Owner], list[Interval], Intervals]:
        """Agents whose spans have times, with the times."""
        spans = ((node, node.span) for node in self._nodes.values())
        agents = [
            (owner, Interval(span.start_time, span.end_time))
            for node, span in spans
            if span.name not in (RAW_SPAN, REQUEST_SPAN)
            and (span.start_time is not None and span.end_time is not None)
            and (owner := _agent_of(node)) is not None
        ]
        intervals = [when for _, when in agents]
        return [owner for owner, _ in agents], intervals, Intervals(intervals)


def _names(owners: Iterable[Owner]) -> frozenset[str]:
    return frozenset(name for owner in owners for name in owner.names or (NOBODY,))


def _agent_of(node: SpanNode) -> Owner | None:
    """Return the agent of an agent's span, `NOBODY` for one with a generated name; None for other or unnamed spans."""
    name = node.agent_name() or (NOBODY if node.has_made_up_name() else None)
    return None if name is None else Owner(frozenset((name,)), node.id)
