"""Matches the recordings of a model call: the gateway's record, and the spans of tracers in the agent's process.

They are matched by the id of the reply first, then by the span that the request itself named in its `traceparent`: the
span of the call, or one below it such as that of the HTTP request. A span without a reply's id below another call is a
part of it, and one above a call is a wrapper around it. The remaining spans are matched separately for each
instrumentation, because each records a call at most once: first by text, then by time (`pairing.py`). A record or a
span without a match is a separate call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Literal, NamedTuple

from agentlightning.adapter.calls.conversation import conversation_of
from agentlightning.adapter.calls.intervals import Interval
from agentlightning.adapter.calls.pairing import MatchedBy, Told, pairs
from agentlightning.adapter.spans.content import says_model_call
from agentlightning.adapter.spans.tokens import (
    CallReading,
    call_name,
    call_state,
    client_span,
    first_choice,
    has_client_tokens,
    has_failed,
    is_completion_output,
    response_id,
)
from agentlightning.semconv import RAW_SPAN, REQUEST_SPAN
from agentlightning.types import Span

SeenBy = Literal["both", "gateway", "tracer"]
_MOST_BELOW_CALL: Final = 8
"""Maximum number of ancestors, of the span named by a request, that are searched for the span of its call."""


class Unsure(NamedTuple):
    """Candidate spans of one instrumentation for a call."""

    spans: tuple[Span, ...]
    may_be_none: bool
    """True if possibly none of them belongs to the call."""


@dataclass(slots=True)
class CallSpans:
    """The spans that record one model call; at least one of `record` and `seen` is set."""

    record: Span | None = None
    """The gateway's span, with the tokens."""
    request: Span | None = None
    """The gateway's span, with the messages."""
    seen: Span | None = None
    """A tracer's span."""
    matched_by: MatchedBy | None = None
    """Method that matched `record` and `seen`; None if only one of them is set."""
    reading: CallReading | None = None
    """The call as read from `record` or, without it, from `seen`; None before it is read."""
    also: list[Span] = field(default_factory=list[Span])
    """Additional spans that certainly belong to this call: those of other instrumentations."""
    unsure: list[Unsure] = field(default_factory=list[Unsure])
    """Candidate spans of each instrumentation whose span of this call is uncertain."""
    client: Span | None = None
    """The tracer's span in which the request was made, from its `traceparent`: the span of the call if there is one.
    Several retries of a client may name the same span."""
    is_certain: bool = True
    """True if `seen` certainly belongs to this call; otherwise it is one of several candidates."""
    is_further_choice: bool = False
    """True if `record` belongs to a choice other than the first; tracers record only the full call."""

    @property
    def seen_by(self) -> SeenBy:
        if self.record is None:
            return "tracer"
        return "gateway" if self.seen is None else "both"

    @property
    def certain(self) -> list[Span]:
        """The tracers' spans that certainly belong to this call."""
        return [self.seen, *self.also] if self.seen is not None and self.is_certain else self.also


def spans_by_call(
    spans: Sequence[Span], is_call: Callable[[Span], bool] | None = None, *, keep_nested: bool = False
) -> list[CallSpans]:
    """Return the spans of every model call, once each; the calls of an attempt that the gateway recorded come first.

    `is_call` selects the tracers' spans that record a call; without it, their attributes decide. With `keep_nested`, a
    span without a reply's id that is part of another call, or a wrapper around one, also counts as a call.
    """
    attempts: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        attempts.setdefault((span.rollout_id, span.attempt_id), []).append(span)
    each = (_of_attempt(own, is_call or tells_of_call, keep_nested) for own in attempts.values())
    return [call for calls in each for call in calls]


def _of_attempt(spans: Sequence[Span], is_call: Callable[[Span], bool], keep_nested: bool) -> list[CallSpans]:
    requests = {span.span_id: span for span in spans if span.name == REQUEST_SPAN}
    raw = [span for span in spans if span.name == RAW_SPAN]
    with_record = {span.parent_id for span in raw}
    if without := [span for id, span in requests.items() if id not in with_record and tells_of_call(span)]:
        replies = {response_id(span) for span in raw} - {None}
        raw.extend(span for span in without if response_id(span) not in replies)
    records: dict[str, CallSpans] = {}
    by_reply: dict[str, CallSpans] = {}
    further: list[tuple[CallSpans, str]] = []
    for record in raw:
        name, reply = call_name(record), response_id(record)
        if name in records:
            continue
        records[name] = call = CallSpans(record, requests.get(record.parent_id or ""))
        if (first := first_choice(record)) is not None:
            call.is_further_choice = True
            further.append((call, first))
        elif reply is not None:
            by_reply.setdefault(reply, call)
    calls, alone, nameless = [c for c in records.values() if not c.is_further_choice], list[CallSpans](), list[Span]()
    tracer_spans = [span for span in spans if span.name not in (RAW_SPAN, REQUEST_SPAN) and is_call(span)]
    for span in tracer_spans:
        reply = response_id(span)
        if reply is None:
            nameless.append(span)
        elif (twin := by_reply.get(reply)) is None:
            by_reply[reply] = CallSpans(seen=span)
            alone.append(by_reply[reply])
        elif twin.seen is None:
            twin.seen, twin.matched_by = span, "response_id"
        else:
            twin.also.append(span)
    if nameless and not keep_nested:
        nameless = _standing_for_calls(nameless, spans, tracer_spans)
    tellers: dict[int, str] = {}
    if clients := [(call, id) for call in calls if call.record and (id := client_span(call.record))]:
        alone, nameless, tellers = _matched_by_clients(clients, spans, by_reply.values(), alone, nameless)
    if not calls and not nameless:
        calls = alone
    elif alone or nameless:
        _Joining(calls, tellers).join(alone, [CallSpans(seen=span) for span in nameless])
    for call, name in further:
        if (first_one := records.get(name)) is not None:
            call.seen, call.matched_by, call.is_certain = first_one.seen, first_one.matched_by, first_one.is_certain
            call.also, call.unsure, call.client = first_one.also, first_one.unsure, first_one.client
        calls.append(call)
    return calls


def tells_of_call(span: Span) -> bool:
    """True if a span that was not recorded by the gateway records one model call."""
    return (
        "gen_ai.response.id" in span.attributes
        or has_client_tokens(span)
        or says_model_call(span.name, span.attributes)
        or is_completion_output(span.attributes)
    )


def _standing_for_calls(nameless: Sequence[Span], spans: Iterable[Span], calls: Iterable[Span]) -> list[Span]:
    """Return the spans without a reply's id that are calls of their own.

    One below another call is part of it; one above a call that has an id, or without text above one that has text,
    is a wrapper.
    """
    parents = {span.span_id: span.parent_id for span in spans}
    by_id = {span.span_id: span for span in calls}
    above: dict[str, str | None] = {}
    """The nearest call at or above a span."""

    def call_above(span: Span) -> str | None:
        id, path = span.parent_id, list[str]()
        while id is not None and id not in above:
            above[id] = id if id in by_id else None  # also ends the walk where spans are their own ancestors
            path.append(id)
            id = None if id in by_id else parents.get(id)
        nearest = above.get(path[-1] if id is None and path else id or "")
        above.update(dict.fromkeys(path, nearest))
        return nearest

    own = {span.span_id: span for span in nameless}
    nearest_calls = {id: call_above(span) for id, span in by_id.items()}
    wrappers = {outer for inner, outer in nearest_calls.items() if outer is not None and inner not in own}
    for inner, outer in nearest_calls.items():
        if outer in own and inner in own and conversation_of(own[outer]) is None and conversation_of(own[inner]):
            wrappers.add(outer)
    result: list[Span] = []
    for id, span in own.items():
        outer, path = nearest_calls[id], {id}
        while outer in wrappers and outer in own and outer not in path:
            path.add(outer)
            outer = nearest_calls[outer]
        if outer is None and id not in wrappers:
            result.append(span)
    return result


def _matched_by_clients(
    clients: Sequence[tuple[CallSpans, tuple[str, str]]],
    spans: Iterable[Span],
    by_reply: Iterable[CallSpans],
    alone: Sequence[CallSpans],
    nameless: Sequence[Span],
) -> tuple[list[CallSpans], list[Span], dict[int, str]]:
    """Match calls with the spans of calls that their requests named; a span that several named is that of the last try.

    Returns the remaining items of `alone` and `nameless`, and the instrumentation of each call whose request named
    the span of a call: no other span of it is of that call.
    """
    by_id = {span.span_id: span for span in spans}
    owners = {span.span_id: call for call in by_reply for span in call.certain}
    owners |= {span.span_id: CallSpans(seen=span) for span in nameless}
    tellers: dict[int, str] = {}
    matches: dict[int, tuple[CallSpans, CallSpans]] = {}
    for call, (trace_id, span_id) in clients:
        assert call.record is not None
        call_span = by_id.get(span_id)
        if call_span is None or call_span.trace_id != trace_id:
            continue
        path = list(islice(_upwards(call_span, by_id), _MOST_BELOW_CALL))
        call.client = next((span for span in path if span.span_id in owners), call_span)
        own = owners.get(call.client.span_id)
        if own is None or own is call:
            continue
        tellers[id(call)] = _teller(call.client)
        of_other_replies = own.seen is not None and None not in (response_id(call.record), response_id(own.seen))
        if own.record is None and not of_other_replies:
            matches[id(own)] = (call, own)
    for call, own in matches.values():
        if call.seen is None:
            call.seen, call.matched_by = own.seen, "traceparent"
        else:
            call.also.extend(own.certain[:1])
        call.also.extend(own.also)
    matched_ids = {id(own.seen) for _, own in matches.values()}
    remaining = [call for call in alone if id(call.seen) not in matched_ids]
    return remaining, [span for span in nameless if id(span) not in matched_ids], tellers


def _upwards(span: Span | None, by_id: Mapping[str, Span]) -> Iterator[Span]:
    while span is not None:
        yield span
        span = by_id.get(span.parent_id or "")


class _Joining:
    """Adds the spans of one instrumentation after the other to the existing calls, or creates new calls for them."""

    def __init__(self, calls: list[CallSpans], tellers: Mapping[int, str]) -> None:
        """`tellers` maps a call to the instrumentation that has no other span of it."""
        self.calls = calls
        self._told: dict[int, Told] = {}
        self._tellers: dict[int, set[str]] = {id(call): set(map(_teller, call.certain)) for call in calls}
        for call, teller in tellers.items():
            self._tellers[call].add(teller)

    def join(self, named: Sequence[CallSpans], nameless: Sequence[CallSpans]) -> None:
        """Join calls that only tracers recorded: `named` have the distinct id of a reply, `nameless` have no id."""
        recorded = list(self.calls)
        for items, calls in ((named, recorded), (nameless, self.calls)):
            by_teller: dict[str, list[CallSpans]] = {}
            for item in items:
                assert item.seen is not None
                by_teller.setdefault(_teller(item.seen), []).append(item)
            for teller, own in by_teller.items():
                free = [call for call in calls if teller not in self._tellers[id(call)]]
                self._take(free, own, teller)

    def _take(self, calls: Sequence[CallSpans], items: Sequence[CallSpans], teller: str) -> None:
        spans = [item.seen for item in items if item.seen is not None]
        joined_ids: set[int] = set()
        matches = pairs([self._of(call) for call in calls], [self._of(item) for item in items]) if calls else ()
        for pair in matches:
            call, item = calls[pair.call], items[pair.span]
            joined_ids.add(pair.span)
            self._tellers[id(call)].update(map(_teller, item.certain))
            if pair.meant:
                call.unsure.append(Unsure(tuple(spans[at] for at in pair.meant), pair.may_be_none))
            else:
                call.also.extend(item.also)
            if call.seen is None:
                call.seen, call.matched_by, call.is_certain = item.seen, pair.how, not pair.meant
            elif not pair.meant:
                call.also.insert(0, spans[pair.span])
        for at, item in enumerate(items):
            if at not in joined_ids:
                self.calls.append(item)
                self._tellers[id(item)] = set(map(_teller, item.certain))

    def _of(self, call: CallSpans) -> Told:
        if id(call) not in self._told:
            spans = (call.request, call.record) if call.record is not None else (call.seen,)
            self._told[id(call)] = _told_of(spans)
        return self._told[id(call)]


def _teller(span: Span) -> str:
    """Return the instrumentation that wrote a span; where it is not recorded, spans of one name are of one."""
    name = (span.scope or {}).get("name")
    return name if isinstance(name, str) and name else f"span {span.name}"


def _told_of(spans: Sequence[Span | None]) -> Told:
    """Return the account of the last of the spans; its text may be on another one."""
    span = spans[-1]
    assert span is not None
    account = Told(failed=has_failed(span), reply=response_id(span))
    if span.start_time is not None and span.end_time is not None:
        # a leaving agent ends its own span before the gateway notices: only the start of the record is reliable
        end = span.start_time if call_state(span) == "client_left" else span.end_time
        account = account._replace(when=Interval(span.start_time, end))
    conversation = conversation_of(*spans)
    if conversation is None:
        return account
    answer = None if conversation.answer is None else hash(conversation.answer)
    return account._replace(system=conversation.system, lines=hash(conversation.lines), answer=answer)
