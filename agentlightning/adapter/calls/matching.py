"""Matches the two recordings of a model call: the gateway's record, and a tracer's span in the agent's process.

They are matched by the id of the reply first. What is left is matched by the request (the same system message and the
same messages), several equal requests in the order of time; and at last by time alone: the only record that lies
within the only span, where one of the two kept no text. A record or a span without a partner is a call of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from agentlightning.adapter.calls.conversation import conversation_of
from agentlightning.adapter.spans.content import says_model_call
from agentlightning.adapter.spans.tokens import (
    CallReading,
    call_name,
    has_client_tokens,
    has_failed,
    is_completion_output,
    response_id,
)
from agentlightning.semconv import RAW_SPAN, REQUEST_SPAN
from agentlightning.types import Span

SeenBy = Literal["both", "gateway", "tracer"]
MatchedBy = Literal["response_id", "request", "time"]

_SLACK_SECONDS: Final = 0.05
"""How far the clocks of gateway and tracer may be apart."""
_MOST_EQUAL: Final = 64
"""Of more equal requests than these the times are not compared: they are matched in their order."""


@dataclass(slots=True)
class CallSpans:
    """The spans that record one model call; at least one of `record` and `seen` is there."""

    record: Span | None = None
    """The gateway's, with the tokens."""
    request: Span | None = None
    """The gateway's, with the messages."""
    seen: Span | None = None
    """The tracer's."""
    matched_by: MatchedBy | None = None
    """How the two were matched; None if only one saw the call."""
    reading: CallReading | None = None
    """What `record` says of the call, or `seen` where there is none; None before it was read."""

    @property
    def seen_by(self) -> SeenBy:
        if self.record is None:
            return "tracer"
        return "gateway" if self.seen is None else "both"


_Name = tuple[str, str, str | None]
"""Rollout, attempt, and an id that is one within them."""


class Record(NamedTuple):
    """What the gateway kept of a call."""

    record: Span
    request: Span | None


def spans_by_call(spans: Sequence[Span]) -> list[CallSpans]:
    """Return the spans of every model call, once each; calls that the gateway saw come first."""
    requests = {_name(span, span.span_id): span for span in spans if span.name == REQUEST_SPAN}
    raw = [span for span in spans if span.name == RAW_SPAN]
    with_record = {_name(span, span.parent_id) for span in raw}
    raw.extend(span for id, span in requests.items() if id not in with_record and is_call(span))
    seen = [span for span in spans if span.name not in (RAW_SPAN, REQUEST_SPAN) and is_call(span)]
    found: dict[_Name, CallSpans] = {}
    by_reply: dict[_Name, CallSpans] = {}
    for record in raw:
        reply = response_id(record)
        identity = _name(record, call_name(record))
        if identity not in found:
            found[identity] = CallSpans(record, requests.get(_name(record, record.parent_id)))
            if reply is not None:
                by_reply.setdefault(_name(record, reply), found[identity])
    calls, nameless = list(found.values()), list[Span]()
    for span in seen:
        reply = response_id(span)
        if reply is None:
            nameless.append(span)
            continue
        twin = by_reply.get(_name(span, reply))
        if twin is None:
            by_reply[_name(span, reply)] = alone = CallSpans(seen=span)
            calls.append(alone)
        elif twin.seen is None:
            twin.seen, twin.matched_by = span, "response_id"
    if nameless:
        calls.extend(CallSpans(seen=span) for span in _outermost(nameless, spans, seen))
    return _matched(calls) if seen else calls


def _name(span: Span, id: str | None) -> _Name:
    return span.rollout_id, span.attempt_id, id


def is_call(span: Span) -> bool:
    """True if a span that is not the gateway's tells of one model call."""
    return (
        "gen_ai.response.id" in span.attributes
        or has_client_tokens(span)
        or says_model_call(span.name, span.attributes)
        or is_completion_output(span.attributes)
    )


def _outermost(nameless: Sequence[Span], spans: Iterable[Span], calls: Iterable[Span]) -> list[Span]:
    """Return the spans without a reply's id that stand for a call of their own.

    One below another call is a part of it; one above a call that has an id is a wrapper around it.
    """
    parents = {_name(span, span.span_id): _name(span, span.parent_id) for span in spans}
    call_names = {_name(span, span.span_id) for span in calls}
    above: dict[_Name, _Name | None] = {}

    def call_above(span: Span) -> _Name | None:
        name: _Name | None = _name(span, span.parent_id)
        path: list[_Name] = []
        while name is not None and name not in above:
            above[name] = name if name in call_names else None  # also ends the walk where spans are their own ancestors
            if name in call_names:
                break
            path.append(name)
            name = parents.get(name)
        found = None if name is None else above[name]
        above.update(dict.fromkeys(path, found))
        return found

    own = {_name(span, span.span_id) for span in nameless}
    wrappers = {call_above(span) for span in calls if _name(span, span.span_id) not in own}
    return [span for span in nameless if call_above(span) is None and _name(span, span.span_id) not in wrappers]


def _matched(calls: list[CallSpans]) -> list[CallSpans]:
    """Join what is left over on both sides."""
    alone: dict[tuple[str, str], tuple[list[CallSpans], list[CallSpans]]] = {}
    for call in calls:
        if call.matched_by is None:
            span = call.record or call.seen
            assert span is not None
            attempt = (span.rollout_id, span.attempt_id)
            alone.setdefault(attempt, ([], []))[call.record is None].append(call)
    joined: set[int] = set()
    for kept, told in alone.values():
        records = [Record(call.record, call.request) for call in kept if call.record is not None]
        spans = [call.seen for call in told if call.seen is not None]
        for at, place, how in match_the_rest(records, spans):
            kept[at].seen, kept[at].matched_by = spans[place], how
            joined.add(id(told[place]))
    return [call for call in calls if id(call) not in joined] if joined else calls


def match_the_rest(records: Sequence[Record], spans: Sequence[Span]) -> list[tuple[int, int, MatchedBy]]:
    """Return pairs of (index of a record, index of a span, how) for what the ids of replies did not match."""
    if not records or not spans:
        return []
    record_requests = [_request_hash(record.request, record.record) for record in records]
    span_requests = [_request_hash(span) for span in spans]
    pairs = _by_request(records, record_requests, spans, span_requests)
    done, taken = {at for at, _, _ in pairs}, {place for _, place, _ in pairs}
    left = [at for at in _by_start([record.record for record in records]) if at not in done]
    rest = [place for place in range(len(spans)) if place not in taken]
    return pairs + _by_time(left, records, record_requests, rest, spans, span_requests)


def _request_hash(*spans: Span | None) -> int | None:
    conversation = conversation_of(*spans)
    return None if conversation is None else hash(conversation.request)


def _by_request(
    records: Sequence[Record],
    record_requests: Sequence[int | None],
    spans: Sequence[Span],
    span_requests: Sequence[int | None],
) -> list[tuple[int, int, MatchedBy]]:
    waiting: dict[int, list[int]] = {}
    for at in _by_start([record.record for record in records]):
        if (request := record_requests[at]) is not None:
            waiting.setdefault(request, []).append(at)
    pairs: list[tuple[int, int, MatchedBy]] = []
    for place in _by_start(spans):
        request = span_requests[place]
        equal = waiting.get(request, []) if request is not None else []
        if not equal:
            continue
        near = [at for at in equal[:_MOST_EQUAL] if _lies_within(records[at].record, spans[place])]
        failed, named = has_failed(spans[place]), response_id(spans[place]) is not None
        near = [at for at in near if has_failed(records[at].record) == failed] or near
        # The last one within is what the client returned after its own retries. A reply by another name is another
        # call, unless the time says that it is this one.
        chosen = near[-1] if near else next((at for at in equal if not named or _nameless(records[at])), None)
        if chosen is not None:
            equal.remove(chosen)
            pairs.append((chosen, place, "request"))
    return pairs


def _by_time(
    left: Sequence[int],
    records: Sequence[Record],
    record_requests: Sequence[int | None],
    rest: Sequence[int],
    spans: Sequence[Span],
    span_requests: Sequence[int | None],
) -> list[tuple[int, int, MatchedBy]]:
    starts = [_start(records[at].record) for at in left]
    wanted: dict[int, list[int]] = {}
    for place in rest:
        span = spans[place]
        if span.start_time is None or span.end_time is None:
            continue
        within: list[int] = []
        for index in range(bisect_left(starts, span.start_time - _SLACK_SECONDS), len(left)):
            at = left[index]
            if _start(records[at].record) > span.end_time or len(within) > _MOST_EQUAL:
                break
            if _lies_within(records[at].record, span):
                within.append(at)
        answered = [at for at in within if not has_failed(records[at].record)] or within
        if len(answered) == 1:
            wanted.setdefault(answered[0], []).append(place)
    pairs: list[tuple[int, int, MatchedBy]] = []
    for at, places in wanted.items():
        silent = len(places) == 1 and (record_requests[at] is None or span_requests[places[0]] is None)
        if silent and (response_id(spans[places[0]]) is None or _nameless(records[at])):
            pairs.append((at, places[0], "time"))
    return pairs


def _nameless(record: Record) -> bool:
    return response_id(record.record) is None


def _by_start(spans: Sequence[Span]) -> list[int]:
    return sorted(range(len(spans)), key=lambda at: (_start(spans[at]), spans[at].sequence_id))


def _start(span: Span) -> float:
    return float("inf") if span.start_time is None else span.start_time


def _lies_within(record: Span, span: Span) -> bool:
    times = (record.start_time, record.end_time, span.start_time, span.end_time)
    if None in times:
        return False
    began, ended, start, end = (time or 0.0 for time in times)
    return began >= start - _SLACK_SECONDS and ended <= end + _SLACK_SECONDS
