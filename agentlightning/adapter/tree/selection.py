"""Selects the calls of a tree for training, and names their agents.

A call may be recorded several times: tracers in the agent's process record its agent, the gateway its tokens.
`calls/matching.py` assigns spans to calls, `owners.py` finds their agents. A filter by name selects a call if all its
possible agents match, and excludes it as `unknown_agent` if only some match.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Final

from agentlightning.adapter.calls.calls import ANY_AGENT, is_of_other_policy
from agentlightning.adapter.calls.matching import CallSpans, spans_by_call, tells_of_call
from agentlightning.adapter.spans.attributes import Problem
from agentlightning.adapter.spans.tokens import call_role, generated_nothing, is_stale
from agentlightning.adapter.tree.node import SpanNode
from agentlightning.adapter.tree.owners import NOBODY, Owner, Owners
from agentlightning.types import Attributes, Span

LLM_CALL_MATCH: Final = r"openai\.chat\.completion"


@dataclass(frozen=True, slots=True)
class SelectionRules:
    """Rules for the selection of calls; `TracerTraceToTriplet` documents each."""

    llm_call_match: str = LLM_CALL_MATCH
    agent_match: str | None = None
    exclude_llm_call_in_reward: bool = True
    drop_unnamed_nested: bool = True
    """True excludes a call without a response id that lies below another call."""
    policy: str | None = None
    """Only calls of this policy; None excludes those of policies that are not trained."""
    agent_above: str | None = None
    """The agent above the whole tree."""


@dataclass
class SelectedCall:
    """One model call: its position, its agent, its reward, and the gateway's record of it, if any."""

    node: SpanNode
    agent_name: str
    branch: str
    """Id of the agent's span that the call belongs to, otherwise of the root above it."""
    record: Span | None = None
    request: Span | None = None
    """The gateway's span with the messages."""
    reward: Span | None = None
    """The span of its reward."""

    @property
    def sequence_id(self) -> int:
        """Number that the gateway assigned when the call arrived; otherwise that of the tracer's span."""
        return self.node.span.sequence_id if self.record is None else self.record.sequence_id

    @property
    def start_time(self) -> float:
        """Seconds since the epoch; infinity if unknown."""
        start = self.node.span.start_time
        return math.inf if start is None else start

    @cached_property
    def span(self) -> Span:
        """One span with all recorded attributes of the call; the gateway's take precedence."""
        if self.record is None:
            return self.node.span
        attributes: Attributes = {}
        for span in (self.request, self.node.span, self.record):
            if span is not None:
                attributes.update(span.attributes)
        return self.node.span.model_copy(update={"attributes": attributes, "sequence_id": self.record.sequence_id})


def select_calls(
    root: SpanNode, rules: SelectionRules, problems: list[Problem], *, by_time: bool = False
) -> list[SelectedCall]:
    """Return the model calls of a tree in tree order, calls that only the gateway recorded after the others.

    If no span names an agent, times are used with `by_time`. Calls that a filter by name excludes because their agent
    is uncertain are added to `problems`.
    """
    pattern = re.compile(rules.llm_call_match)
    nodes = list(_in_reward(root))
    order = {node.id: place for place, (node, _) in enumerate(nodes)}
    in_reward = {node.id for node, is_below in nodes if is_below} if rules.exclude_llm_call_in_reward else set[str]()
    spans = [node.span for node, _ in nodes]
    names = {name for name in {span.name for span in spans} if pattern.search(name)}
    calls = spans_by_call(
        spans,
        lambda span: tells_of_call(span) or span.name in names,
        keep_nested=not rules.drop_unnamed_nested,
    )
    owners = Owners(root, by_time)
    entries: list[tuple[bool, int, SelectedCall]] = []
    for call in calls:
        record, certain = call.record, call.certain
        own = certain if record is None else [record, *certain]
        if any(map(is_stale, own)) or (record is not None and generated_nothing(record)):
            continue
        if record is None and names.isdisjoint([span.name for span in own]):
            continue
        if is_of_other_policy(record, rules.policy):
            continue
        if in_reward and any(span.span_id in in_reward for span in _placed(call)):
            continue
        owner = owners.of(call)
        if rules.agent_above is not None and not owner.names:
            owner = owner._replace(names=frozenset((rules.agent_above,)))
        if rules.agent_match is not None:
            above = rules.agent_above is not None and owner.names == {rules.agent_above}
            verdict = above or _matches(owner, call_role(record), rules.agent_match)
            if verdict is None:
                problems.append(Problem("unknown_agent", own[0].span_id, _why_unknown(owner, rules.agent_match)))
            if not verdict:
                continue
        is_seen = bool(certain) and not call.is_further_choice
        main_span = certain[0] if is_seen else call.request or record
        assert main_span is not None
        place, agent = order[main_span.span_id], owner.name or call_role(record) or ANY_AGENT
        selected = SelectedCall(nodes[place][0], agent, owner.branch, record, call.request)
        entries.append((not is_seen, place, selected))
    return [call for _, _, call in sorted(entries, key=itemgetter(0, 1))]


def _in_reward(root: SpanNode) -> Iterator[tuple[SpanNode, bool]]:
    """Yield each node, parents first, and whether it is below the span of a reward."""
    waiting: list[tuple[SpanNode, bool]] = [(root, False)]
    while waiting:
        node, inside = waiting.pop()
        yield node, inside
        if node.children:
            inside = inside or node.is_reward_span()
            waiting.extend((child, inside) for child in reversed(node.children))


def _placed(call: CallSpans) -> list[Span]:
    """Return the spans whose position in the tree counts for a call: those of tracers, or else the gateway's."""
    if call.certain or call.client is not None:
        return call.certain or [span for span in (call.client,) if span is not None]
    unsure = [span for each in call.unsure for span in each.spans]
    return unsure or [span for span in (call.record,) if span is not None]


def _matches(owner: Owner, role: str | None, agent_match: str) -> bool | None:
    """True if all possible agents of a call match, False if none does, None if only some of them do."""
    if role is not None and re.search(agent_match, role):
        return True
    verdicts = {name != NOBODY and re.search(agent_match, name) is not None for name in owner.names}
    return None if len(verdicts) > 1 else verdicts == {True}


def _why_unknown(owner: Owner, agent_match: str) -> str:
    names = ", ".join(sorted(name or "none" for name in owner.names))
    return (
        f"it may be a call of several agents ({names}), and agent_match={agent_match!r} does not match all of them; "
        "neither ids nor texts identify the agent"
    )
