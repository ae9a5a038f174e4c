"""Which model call earned which reward, for rewards that are emitted beside the calls.

Each reward goes to one call that has none yet, rewards in the order of their times:

1. Links on the reward (`agentlightning.link.*`) name spans: the newest call at or below one of them. A link that meets
   no call gives the reward to nobody; nothing is guessed.
2. Otherwise the newest call that had ended when the reward was given, first among the calls below the reward's own
   parent, then below its grandparent, and so on. Parents are those that the spans state, not those made by repair.
3. Where clocks find none, a call that the gateway recorded is older than a reward with a larger sequence id.

A reward that finds no call is lost, and reported. Departures from the described system: it knew neither links nor
scopes nor step 3, and lost rewards silently.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush
from operator import itemgetter
from typing import Generic, TypeVar

from agentlightning.adapter.spans.rewards import links, reward_value
from agentlightning.adapter.spans.tokens import is_stale
from agentlightning.adapter.tree.node import SpanNode
from agentlightning.adapter.tree.selection import SelectedCall
from agentlightning.types import Span

NodeT = TypeVar("NodeT", bound=SpanNode)
_EVERYWHERE = None
_MOST_SCOPES = 32
"""Scopes per span beside the whole trace, so that a chain of thousands of nested spans stays cheap."""


class RewardMatchPolicy(StrEnum):
    """How rewards without links find their call."""

    FIRST_SIBLING = "first_sibling"
    """The newest call among the earlier children of the same parent."""
    FIRST_OCCURRENCE = "first_occurrence"
    """The newest call that had ended, in the nearest scope."""


@dataclass(slots=True)
class RewardMatches:
    """The outcome: the reward span of each rewarded call by the id of its node, and the rewards without a call."""

    earned: dict[str, Span] = field(default_factory=dict[str, Span])
    lost: list[Span] = field(default_factory=list[Span])


def match_rewards(root: NodeT, calls: Sequence[SelectedCall[NodeT]], policy: RewardMatchPolicy) -> RewardMatches:
    """Give every reward below `root` to one of the calls."""
    nodes = root.traverse()
    rewards = [node for node in nodes if reward_value(node.span) is not None and not is_stale(node.span)]
    matches = RewardMatches()
    if not rewards:
        return matches
    rewards.sort(key=_when)
    stated = [(node, links(node.span)) for node in rewards]
    linked = [(node, wanted) for node, wanted in stated if wanted]
    free = [node for node, wanted in stated if not wanted]
    if linked:
        _by_links(linked, nodes, calls, matches)
    if policy is RewardMatchPolicy.FIRST_SIBLING:
        _by_siblings(nodes, free, calls, matches)
    else:
        _by_recency(nodes, free, calls, matches)
    return matches


def _when(node: SpanNode) -> tuple[float, int]:
    return (float("inf") if node.start_time is None else node.start_time, node.span.sequence_id)


# --- links ---------------------------------------------------------------------------------------------------------


def _by_links(
    rewards: Sequence[tuple[NodeT, list[tuple[str, str]]]],
    nodes: Sequence[NodeT],
    calls: Sequence[SelectedCall[NodeT]],
    matches: RewardMatches,
) -> None:
    index = _LinkIndex(nodes, calls)
    by_node = {call.node.id: call for call in calls}
    for reward, wanted in rewards:
        meant = [
            call
            for node in index.find(wanted)
            for inner in node.walk()
            if (call := by_node.get(inner.id)) is not None and inner.id not in matches.earned
        ]
        if meant:
            newest = max(meant, key=lambda call: (call.start_time, call.sequence_id))
            matches.earned[newest.node.id] = reward.span
        else:
            matches.lost.append(reward.span)


class _LinkIndex(Generic[NodeT]):
    """Nodes by the value of an attribute; a selected call also answers for the gateway's record of it."""

    def __init__(self, nodes: Sequence[NodeT], calls: Sequence[SelectedCall[NodeT]]) -> None:
        self._spans = [(node.span, node) for node in nodes]
        self._spans += [(call.record, call.node) for call in calls if call.record is not None]
        self._tables: dict[str, dict[str, list[tuple[Span, NodeT]]]] = {}

    def find(self, wanted: Sequence[tuple[str, str]]) -> Iterator[NodeT]:
        (key, value), *others = wanted
        seen: set[str] = set()
        for span, node in self._table(key).get(value, ()):
            if node.id not in seen and all(_linked_value(span, key) == value for key, value in others):
                seen.add(node.id)
                yield node

    def _table(self, key: str) -> dict[str, list[tuple[Span, NodeT]]]:
        if key not in self._tables:
            table: dict[str, list[tuple[Span, NodeT]]] = {}
            for span, node in self._spans:
                value = _linked_value(span, key)
                if value is not None:
                    table.setdefault(value, []).append((span, node))
            self._tables[key] = table
        return self._tables[key]


def _linked_value(span: Span, key: str) -> str | None:
    if key == "trace_id":
        return span.trace_id
    if key == "span_id":
        return span.span_id
    value = span.attributes.get(key)
    return value if isinstance(value, str) else None


# --- siblings ------------------------------------------------------------------------------------------------------


def _by_siblings(
    nodes: Sequence[NodeT], rewards: Sequence[NodeT], calls: Sequence[SelectedCall[NodeT]], matches: RewardMatches
) -> None:
    call_ids = {call.node.id for call in calls}
    reward_ids = {node.id for node in rewards}
    matched: set[str] = set()
    for parent in nodes:
        open_calls: list[NodeT] = []
        for child in parent.children:
            if child.id in call_ids and child.id not in matches.earned:
                open_calls.append(child)
            if child.id in reward_ids:
                place = next((at for at in reversed(range(len(open_calls))) if _ended(open_calls[at], child)), None)
                if place is not None:
                    matches.earned[open_calls.pop(place).id] = child.span
                    matched.add(child.id)
    matches.lost.extend(node.span for node in rewards if node.id not in matched)


def _ended(call: SpanNode, reward: SpanNode) -> bool:
    return call.end_time is not None and reward.start_time is not None and call.end_time <= reward.start_time


# --- recency, scope by scope ---------------------------------------------------------------------------------------


def _by_recency(
    nodes: Sequence[NodeT], rewards: Sequence[NodeT], calls: Sequence[SelectedCall[NodeT]], matches: RewardMatches
) -> None:
    scopes = _Scopes(nodes, rewards)
    recorded = _Recorded(calls)
    timed = [(call.node.end_time, order, call) for order, call in enumerate(calls) if call.node.end_time is not None]
    timed.sort(key=itemgetter(0, 1))
    by_arrival = all(call.record is not None for call in calls)  # as the calls themselves are ordered then
    heaps: dict[str | None, list[tuple[float, int, str]]] = {}
    added = 0
    for reward in rewards:
        while reward.start_time is not None and added < len(timed) and timed[added][0] <= reward.start_time:
            _, order, call = timed[added]
            entry = (-(call.sequence_id if by_arrival else call.start_time), -order, call.node.id)
            for scope in scopes.around(call.node):
                heappush(heaps.setdefault(scope, []), entry)
            added += 1
        winner = None
        for heap in (heaps.get(scope, []) for scope in scopes.around(reward)):
            while winner is None and heap:
                newest = heappop(heap)[2]
                winner = None if newest in matches.earned else newest
        if winner is None:
            winner = recorded.newest_before(reward.span.sequence_id, matches.earned)
        if winner is None:
            matches.lost.append(reward.span)
        else:
            matches.earned[winner] = reward.span


class _Scopes:
    """The ancestors that a reward has, for rewards and calls alike; nearest first, the whole trace last."""

    def __init__(self, nodes: Sequence[SpanNode], rewards: Sequence[SpanNode]) -> None:
        ids = {node.id for node in nodes}
        self._parent = {
            node.id: parent for node in nodes if (parent := node.span.parent_id) in ids and parent is not None
        }
        self._asked: set[str] = set()
        for reward in rewards:
            at = self._parent.get(reward.id)
            for _ in range(_MOST_SCOPES):
                if at is None:
                    break
                self._asked.add(at)
                at = self._parent.get(at)
        self._known: dict[str | None, tuple[str, ...]] = {None: ()}

    def around(self, node: SpanNode) -> tuple[str | None, ...]:
        path: list[str] = []
        at = self._parent.get(node.id)
        while at not in self._known and at is not None:
            path.append(at)
            at = self._parent.get(at)
        scopes = self._known[at]
        for ancestor in reversed(path):
            scopes = (ancestor, *scopes[: _MOST_SCOPES - 1]) if ancestor in self._asked else scopes
            self._known[ancestor] = scopes
        return (*scopes, _EVERYWHERE)


class _Recorded:
    """The calls that the gateway recorded, by the numbers that it gave them."""

    def __init__(self, calls: Sequence[SelectedCall[NodeT]]) -> None:
        found = sorted((call for call in calls if call.record is not None), key=lambda call: call.sequence_id)
        self._numbers = [call.sequence_id for call in found]
        self._ids = [call.node.id for call in found]
        self._free = list(range(len(found) + 1))
        """How many of the first so many calls are left when those at their end that have earned are taken away."""

    def newest_before(self, number: int, earned: dict[str, Span]) -> str | None:
        """Return the newest call with a smaller number that has earned nothing."""
        count, way = bisect_left(self._numbers, number), list[int]()
        while count and (self._free[count] != count or self._ids[count - 1] in earned):
            way.append(count)
            count = self._free[count] if self._free[count] != count else count - 1
        for passed in way:  # so that no call is passed over twice
            self._free[passed] = count
        return self._ids[count - 1] if count else None
