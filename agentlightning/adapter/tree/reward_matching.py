"""Assigns rewards that are separate spans to model calls.

Each reward is assigned to one call that has none yet, in the order of the rewards' times:

1. Links on the reward (`agentlightning.link.*`) name spans: the newest call at or below one of them. If no call matches
   a link, the reward is assigned to no call; nothing is guessed.
2. Otherwise the newest call that had ended when the reward was emitted, first among the calls below the reward's own
   parent, then below its grandparent, and so on. Parents are the recorded ones, not those set by repair.
3. If time finds no call, a call that the gateway recorded is older than a reward with a larger sequence id.

A reward without a matching call is lost, and reported. Departures from the described system: it had neither links nor
scopes nor step 3, and lost rewards silently.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import StrEnum
from operator import itemgetter
from typing import NamedTuple

from agentlightning.adapter.spans.rewards import links, reward_value
from agentlightning.adapter.spans.tokens import is_stale
from agentlightning.adapter.tree.node import SpanNode
from agentlightning.adapter.tree.selection import SelectedCall
from agentlightning.types import Span

_MOST_SCOPES = 256
"""Maximum number of examined ancestors of a span, which limits the cost of thousands of nested spans."""
Scope = str | None
"""The id of an ancestor; None is the whole trace."""


class RewardMatchPolicy(StrEnum):
    """Rules that assign rewards without links to calls."""

    FIRST_SIBLING = "first_sibling"
    """The newest call among the earlier children of the same parent."""
    FIRST_OCCURRENCE = "first_occurrence"
    """The newest call that had ended, in the nearest scope."""


class RewardMatches(NamedTuple):
    """The reward span of each rewarded call by the id of its node, and the rewards without a call."""

    earned: dict[str, Span]
    lost: list[Span]


def match_rewards(root: SpanNode, calls: Sequence[SelectedCall], policy: RewardMatchPolicy) -> RewardMatches:
    """Assign every reward below `root` to one of the calls."""
    nodes = root.traverse()
    rewards = [node for node in nodes if reward_value(node.span) is not None and not is_stale(node.span)]
    matches = RewardMatches({}, [])
    if not rewards:
        return matches
    rewards.sort(key=lambda node: (math.inf if node.start_time is None else node.start_time, node.span.sequence_id))
    links_by_reward = {node.id: links(node.span) for node in rewards}
    if linked := [node for node in rewards if links_by_reward[node.id]]:
        _by_links([(node, links_by_reward[node.id]) for node in linked], nodes, calls, matches)
    free = [node for node in rewards if not links_by_reward[node.id]]
    match = _by_siblings if policy is RewardMatchPolicy.FIRST_SIBLING else _by_recency
    match(nodes, free, calls, matches)
    return matches


def _by_links(
    rewards: Sequence[tuple[SpanNode, list[tuple[str, str]]]],
    nodes: Sequence[SpanNode],
    calls: Sequence[SelectedCall],
    matches: RewardMatches,
) -> None:
    by_node = {call.node.id: call for call in calls}
    spans = [(node.span, node) for node in nodes]
    spans += [(call.record, call.node) for call in calls if call.record is not None]
    tables: dict[str, dict[object, list[tuple[Span, SpanNode]]]] = {}
    for reward, ((key, value), *others) in rewards:
        if key not in tables:
            tables[key] = defaultdict(list)
            for span, node in spans:
                tables[key][_linked_value(span, key)].append((span, node))
        targets = {
            node.id: node
            for span, node in tables[key].get(value, ())
            if all(_linked_value(span, other) == target_value for other, target_value in others)
        }
        inner = (each.id for node in targets.values() for each in node.walk())
        candidates = [by_node[id] for id in inner if id in by_node and id not in matches.earned]
        if candidates:
            newest = max(candidates, key=lambda call: (call.start_time, call.sequence_id))
            matches.earned[newest.node.id] = reward.span
        else:
            matches.lost.append(reward.span)


def _linked_value(span: Span, key: str) -> object:
    value = getattr(span, key) if key in ("trace_id", "span_id") else span.attributes.get(key)
    return value if isinstance(value, str) else None


def _by_siblings(
    nodes: Sequence[SpanNode], rewards: Sequence[SpanNode], calls: Sequence[SelectedCall], matches: RewardMatches
) -> None:
    call_ids, waiting = {call.node.id for call in calls}, {node.id: node for node in rewards}
    for parent in nodes:
        open_calls: list[SpanNode] = []
        for child in parent.children:
            if child.id in call_ids and child.id not in matches.earned:
                open_calls.append(child)
            if child.id in waiting:
                place = next((at for at in reversed(range(len(open_calls))) if _ended(open_calls[at], child)), None)
                if place is not None:
                    matches.earned[open_calls.pop(place).id] = waiting.pop(child.id).span
    matches.lost.extend(node.span for node in waiting.values())


def _ended(call: SpanNode, reward: SpanNode) -> bool:
    return call.end_time is not None and reward.start_time is not None and call.end_time <= reward.start_time


def _by_recency(
    nodes: Sequence[SpanNode], rewards: Sequence[SpanNode], calls: Sequence[SelectedCall], matches: RewardMatches
) -> None:
    scopes_around = _scopes(nodes, rewards)
    recorded = Recorded((call.sequence_id, call.node.id) for call in calls if call.record is not None)
    timed = [(call.node.end_time, order, call) for order, call in enumerate(calls) if call.node.end_time is not None]
    ending = deque(sorted(timed, key=itemgetter(0, 1)))
    by_arrival = all(call.record is not None for call in calls)  # the order of the calls themselves
    ended_calls: dict[Scope, list[tuple[float, int, str]]] = defaultdict(list)
    """Ended calls by scope, the newest last."""
    for reward in rewards:
        while ending and reward.start_time is not None and ending[0][0] <= reward.start_time:
            _, order, call = ending.popleft()
            age = call.sequence_id if by_arrival else call.start_time
            for scope in scopes_around(call.node):
                insort(ended_calls[scope], (age, order, call.node.id))
        winner = None
        for newest in (ended_calls[scope] for scope in scopes_around(reward)):
            while newest and newest[-1][2] in matches.earned:
                newest.pop()
            if newest:
                winner = newest[-1][2]
                break
        winner = winner or recorded.newest_before(reward.span.sequence_id, matches.earned)
        if winner is None:
            matches.lost.append(reward.span)
        else:
            matches.earned[winner] = reward.span


def _scopes(nodes: Sequence[SpanNode], rewards: Sequence[SpanNode]) -> Callable[[SpanNode], list[Scope]]:
    """Return a function from a node to the ancestors that it shares with rewards: nearest first, the trace last."""
    parents = {node.id: node.span.parent_id for node in nodes}

    def above(node: SpanNode) -> list[str]:
        path: list[str] = []
        at = node.span.parent_id
        while at in parents and at is not None and len(path) < _MOST_SCOPES:
            path.append(at)
            at = parents[at]
        return path

    reward_scopes = {id for reward in rewards for id in above(reward)}
    return lambda node: [*(id for id in above(node) if id in reward_scopes), None]


class Recorded:
    """The calls that the gateway recorded, by their sequence ids."""

    def __init__(self, numbered: Iterable[tuple[int, str]]) -> None:
        self._calls = sorted(numbered, key=itemgetter(0))

    def newest_before(self, number: int, earned: Collection[str]) -> str | None:
        """Return the newest call with a smaller number that has no reward."""
        at = bisect_left(self._calls, number, key=itemgetter(0)) - 1
        while at >= 0 and self._calls[at][1] in earned:
            del self._calls[at]
            at -= 1
        return self._calls[at][1] if at >= 0 else None
