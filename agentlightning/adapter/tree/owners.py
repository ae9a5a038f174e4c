"""Whose a model call is: the names of the agents that it may belong to.

What a span states counts first: the agent that the span of a call names itself, or that of the nearest span above it,
by the parents that spans state; then the same of the span that the request of the call named. A span without an agent
above it, and a call that only the gateway saw, belong to the agents whose spans lie around them in time. More than one
name means that nothing proves whose the call is.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final, Generic, NamedTuple, TypeVar

from agentlightning.adapter.calls.intervals import Interval, Intervals, narrowed
from agentlightning.adapter.calls.matching import CallSpans
from agentlightning.adapter.tree.node import SpanNode
from agentlightning.semconv import RAW_SPAN, REQUEST_SPAN
from agentlightning.types import Span

NodeT = TypeVar("NodeT", bound=SpanNode)

NOBODY: Final = ""
"""Stands for code outside of every agent, among names."""
_MOST_AROUND: Final = 256
"""Spans of agents that are looked at around one call; of more of them nothing is told."""


class Owner(NamedTuple):
    """The agents that a call may belong to."""

    names: frozenset[str]
    """One name if it is certain; several if not; none if no agent was there."""
    branch: str
    """Id of the agent's span, else of the root."""

    @property
    def name(self) -> str | None:
        """The only name, if there is one."""
        (name,) = self.names if len(self.names) == 1 else (NOBODY,)
        return name or None


class Owners(Generic[NodeT]):
    """The owners of the calls of a tree. `by_time` says whether times count where spans state nothing."""

    def __init__(self, root: NodeT, by_time: bool) -> None:
        self._root = root
        self._nodes = {node.id: node for node in root.walk()}
        self._by_time = by_time
        self._stated: dict[str, Owner | None] = {}
        self._nobody = Owner(frozenset(), root.id)
        self._agents: tuple[list[Owner], dict[int, Interval], Intervals] | None = None

    def of(self, call: CallSpans) -> Owner:
        """Return whose a call is."""
        nodes = [node for span in call.certain if (node := self._nodes.get(span.span_id)) is not None]
        for node in nodes:
            if (found := self.of_node(node)) is not None:
                return found
        client = None if call.client is None else self._nodes.get(call.client.span_id)
        if client is not None and (found := self._at(client)) is not None:
            return found
        for spans, may_be_none in call.unsure:
            owners = self._owners(spans)
            names = frozenset(name for owner in owners for name in owner.names or (NOBODY,))
            if len(names) == 1 and not may_be_none:
                return owners[0]
        gateway = call.request or call.record
        placed = nodes or [self._nodes[each.span_id] for each in (gateway,) if each and each.span_id in self._nodes]
        told = (self._around(node) for node in placed)
        found = next((owner for owner in told if owner.names), self._nobody)
        return found if nodes else self._with_unsure(found, call)

    def of_node(self, node: NodeT) -> Owner | None:
        """Return the agent that a span of a call states; None if it states none."""
        above = self._above(node)
        own = node.own_agent_name()
        if own is None or (above is not None and own in above.names):
            return above
        return Owner(frozenset((own,)), node.id if above is None else above.branch)

    def _at(self, node: NodeT) -> Owner | None:
        """Return the agent whose span it is, or the nearest above it states; None if none does."""
        return _agent_of(node) or self.of_node(node)

    def _above(self, node: NodeT) -> Owner | None:
        path: list[str] = []
        at = node.span.parent_id
        found: Owner | None = None
        nameless = 0
        while at is not None and at not in self._stated:
            parent = self._nodes.get(at)
            if parent is None:
                break
            self._stated[at] = None  # also ends the walk where spans are their own ancestors
            path.append(at)
            if (found := _agent_of(parent)) is not None:
                break
            if not nameless and parent.is_of_agent():
                nameless = len(path)
            at = parent.span.parent_id
        else:
            found = None if at is None else self._stated[at]
        self._stated.update(dict.fromkeys(path, found))
        if found is None and nameless:  # an agent without a name, and not within another
            found = Owner(frozenset((NOBODY,)), path[nameless - 1])
            self._stated.update(dict.fromkeys(path[:nameless], found))
        return found

    def _around(self, node: NodeT) -> Owner:
        """Return the agents whose spans lie around a span in time."""
        span = node.span
        if not self._by_time or span.start_time is None or span.end_time is None:
            return self._nobody
        if self._agents is None:
            self._agents = self._named_spans()
        owners, intervals, tree = self._agents
        own = Interval(span.start_time, span.end_time)
        around = list(islice(tree.around(own), _MOST_AROUND + 1)) if owners else []
        if span.name not in (RAW_SPAN, REQUEST_SPAN):  # by the clock of the agents' spans
            around = [at for at in around if intervals[at].holds(own, 0.0)]
        names = frozenset(name for at in around for name in owners[at].names)
        if len(names) > 1:
            around = narrowed(own, around, intervals)
            names = frozenset(name for at in around for name in owners[at].names)
        if not around:
            return self._nobody
        if len(around) > _MOST_AROUND:
            names |= {NOBODY}
        tightest = min(around, key=lambda at: intervals[at].end - intervals[at].start)
        return Owner(names, owners[tightest].branch if len(names) == 1 else self._root.id)

    def _named_spans(self) -> tuple[list[Owner], dict[int, Interval], Intervals]:
        owners: list[Owner] = []
        intervals: list[Interval] = []
        for node in self._nodes.values():
            span = node.span
            if span.name in (RAW_SPAN, REQUEST_SPAN) or span.start_time is None or span.end_time is None:
                continue
            if (owner := _agent_of(node)) is not None:
                owners.append(owner)
                intervals.append(Interval(span.start_time, span.end_time))
        return owners, dict(enumerate(intervals)), Intervals(intervals)

    def _with_unsure(self, found: Owner, call: CallSpans) -> Owner:
        """Return an owner with the names of the spans that may be of the call."""
        owners = [owner for spans, _ in call.unsure for owner in self._owners(spans)]
        return Owner(found.names.union(*(owner.names or (NOBODY,) for owner in owners)), found.branch)

    def _owners(self, spans: Iterable[Span]) -> list[Owner]:
        nodes = (node for span in spans if (node := self._nodes.get(span.span_id)) is not None)
        return [self.of_node(node) or self._around(node) for node in nodes]


def _agent_of(node: SpanNode) -> Owner | None:
    """Return the agent whose span it is, `NOBODY` for one with a made-up name; None if it is of none or unnamed."""
    name = node.agent_name() or (NOBODY if node.has_made_up_name() else None)
    return None if name is None else Owner(frozenset((name,)), node.id)
