"""Selects the spans of a tree that are model calls to learn from, and names their agents.

A call may be recorded twice: the tracer in the agent's process knows whose call it was, the gateway knows its tokens.
Both become one selected call, with its position in the tree from the tracer and its tokens from the gateway.
`calls/matching.py` says how they are matched; gateway records are told apart by the gateway's own call id.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

from agentlightning.adapter.calls.calls import ANY_AGENT, is_of_other_policy
from agentlightning.adapter.calls.matching import Record, match_the_rest
from agentlightning.adapter.spans.content import says_model_call
from agentlightning.adapter.spans.tokens import call_name, generated_nothing, is_gateway_call, is_stale, response_id
from agentlightning.adapter.tree.node import SpanNode
from agentlightning.semconv import REQUEST_SPAN
from agentlightning.types import Attributes, Span

NodeT = TypeVar("NodeT", bound=SpanNode)

LLM_CALL_MATCH: Final = r"openai\.chat\.completion"


@dataclass(frozen=True, slots=True)
class SelectionRules:
    """Which calls count: see `TracerTraceToTriplet` for the meaning of each."""

    llm_call_match: str = LLM_CALL_MATCH
    agent_match: str | None = None
    exclude_llm_call_in_reward: bool = True
    drop_unnamed_nested: bool = True
    """Leave out a call without a response id that lies below another selected call."""
    policy: str | None = None
    """Only calls of this policy; None leaves out those of policies that are not trained."""


@dataclass(slots=True)
class SelectedCall(Generic[NodeT]):
    """One model call: where it stands, whose it is, and the gateway's record of it if there is one."""

    node: NodeT
    agent_name: str
    branch: str
    """Id of the agent's span that the call belongs to, else of the root above it."""
    record: Span | None = None
    request: Span | None = None
    """The gateway's span with the messages."""

    @property
    def sequence_id(self) -> int:
        """The number that the gateway drew when the call arrived; without its record that of the tracer's span."""
        return self.node.span.sequence_id if self.record is None else self.record.sequence_id

    @property
    def start_time(self) -> float:
        """Seconds since the epoch; infinity where it is unknown."""
        return float("inf") if self.node.start_time is None else self.node.start_time

    def span(self) -> Span:
        """Return one span that says all that is known of the call; the gateway's word counts most."""
        if self.record is None:
            return self.node.span
        attributes: Attributes = {}
        for span in (self.request, self.node.span, self.record):
            if span is not None:
                attributes.update(span.attributes)
        return self.node.span.model_copy(update={"attributes": attributes, "sequence_id": self.record.sequence_id})


class _Place(NamedTuple):
    """What the spans above a node say of it."""

    label: str | None
    branch: str
    in_reward: bool
    in_call: bool


@dataclass(slots=True)
class _Findings(Generic[NodeT]):
    """What one walk over the tree found."""

    taken: list[SelectedCall[NodeT]] = field(default_factory=list["SelectedCall[NodeT]"])
    by_response: dict[str, SelectedCall[NodeT]] = field(default_factory=dict[str, "SelectedCall[NodeT]"])
    refused: set[str] = field(default_factory=set[str])
    """Response ids of the tracer's calls that the rules leave out."""
    other_places: dict[str, _Place] = field(default_factory=dict[str, _Place])
    """Where spans stand that name a response id and are neither the gateway's nor calls by their name."""
    records: list[tuple[NodeT, NodeT | None, _Place]] = field(
        default_factory=list["tuple[NodeT, NodeT | None, _Place]"]
    )
    """The gateway's records, each with the request span above it."""
    unnamed: list[tuple[Span, SelectedCall[NodeT] | _Place | None]] = field(
        default_factory=list["tuple[Span, SelectedCall[NodeT] | _Place | None]"]
    )
    """The tracer's calls without a response id: selected, seen at a place, or left out by the rules."""


def select_calls(root: NodeT, rules: SelectionRules) -> list[SelectedCall[NodeT]]:
    """Return the model calls of a tree in tree order, calls that only the gateway saw after the others."""
    found: _Findings[NodeT] = _Findings()
    pattern = re.compile(rules.llm_call_match)
    for node, above, place in _places(root, rules, pattern):
        span = node.span
        if is_gateway_call(span):
            if not (is_stale(span) or generated_nothing(span)):
                request = above if above is not None and above.span.name == REQUEST_SPAN else None
                found.records.append((node, request, place))
            continue
        reply = response_id(span)
        if not pattern.search(span.name):
            if reply is not None and span.name != REQUEST_SPAN:
                found.other_places.setdefault(reply, place)
            elif reply is None and not place.in_call and says_model_call(span.name, span.attributes):
                found.unnamed.append((span, place))
            continue
        nested = rules.drop_unnamed_nested and reply is None and place.in_call
        if is_stale(span) or nested or not _counts(place, rules):
            if reply is not None:
                found.refused.add(reply)
            elif not nested:
                found.unnamed.append((span, None))
        elif reply is None or reply not in found.by_response:
            call = SelectedCall(node, place.label or ANY_AGENT, place.branch)
            found.taken.append(call)
            if reply is not None:
                found.by_response[reply] = call
            else:
                found.unnamed.append((span, call))
    _add_records(found, rules)
    return [call for call in found.taken if not is_of_other_policy(call.record, rules.policy)]


def _places(
    root: NodeT, rules: SelectionRules, pattern: re.Pattern[str]
) -> Iterator[tuple[NodeT, NodeT | None, _Place]]:
    start = _Place(ANY_AGENT if rules.agent_match is None else None, root.id, False, False)
    waiting: list[tuple[NodeT, NodeT | None, _Place]] = [(root, None, start)]
    while waiting:
        node, above, place = waiting.pop()
        yield node, above, place
        if node.children:
            name = node.agent_name()
            label, branch = place.label, place.branch
            if name is not None:
                matches = rules.agent_match is None or re.search(rules.agent_match, name)
                label, branch = (name if matches else None), node.id
            in_call = place.in_call or (label is not None and pattern.search(node.span.name) is not None)
            inner = _Place(label, branch, place.in_reward or node.is_reward_span(), in_call)
            waiting.extend((child, node, inner) for child in reversed(node.children))


def _counts(place: _Place, rules: SelectionRules) -> bool:
    return place.label is not None and not (place.in_reward and rules.exclude_llm_call_in_reward)


def _add_records(found: _Findings[NodeT], rules: SelectionRules) -> None:
    """Give each gateway record to the tracer's call that it tells of, or make it a call of its own."""
    seen: set[str] = set()
    left: list[tuple[NodeT, NodeT | None, _Place]] = []
    for node, request, place in found.records:
        reply = response_id(node.span)
        identity = call_name(node.span)
        if identity in seen:
            continue
        seen.add(identity)
        twin = found.by_response.get(reply) if reply is not None else None
        if twin is not None and twin.record is None:
            twin.record, twin.request = node.span, None if request is None else request.span
        elif twin is not None or reply not in found.refused:
            left.append((node, request, place))
    # records go to the tracer's calls that name no reply; those that find none are calls where they stand
    records = [Record(node.span, None if request is None else request.span) for node, request, _ in left]
    told = found.unnamed + [
        (call.node.span, call) for call in found.by_response.values() if call.record is None and left
    ]
    partners = {at: told[place][1] for at, place, _ in match_the_rest(records, [span for span, _ in told])}
    for at, (node, request, place) in enumerate(left):
        partner = partners.get(at, place)
        if isinstance(partner, SelectedCall):
            partner.record, partner.request = records[at]
            continue
        partner = partner and found.other_places.get(response_id(node.span) or "", partner)
        if partner is not None and _counts(partner, rules):
            found.taken.append(
                SelectedCall(
                    node=node if request is None else request,
                    agent_name=partner.label or ANY_AGENT,
                    branch=partner.branch,
                    record=node.span,
                    request=None if request is None else request.span,
                )
            )
