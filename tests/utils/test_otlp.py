"""OTLP bodies to spans and back: both forms, every kind of value, bounds, and spans that are rejected by themselves."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.trace import SpanKind

from agentlightning.errors import BadRequestError, TooLargeError
from agentlightning.types import Event, Link, OtelResource, Span, SpanContext, TraceStatus
from agentlightning.types.tracer import DroppedCounts
from agentlightning.utils.otlp import (
    JSON_CT,
    PROTOBUF_CT,
    Rejections,
    UnsupportedMediaError,
    encode_spans,
    form_of,
    message_from_json,
    parse_body,
    request_of,
    spans_from_proto,
    spans_of,
    unpacked,
)

ROUTE = {"agentlightning.rollout_id": "ro-1", "agentlightning.attempt_id": "at-1"}
TRACE_ID, SPAN_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "00f067aa0ba902b8"


def pairs(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()]


def json_body(*spans: dict[str, Any], resource: dict[str, str] | None = None) -> bytes:
    """Return an OTLP/JSON request of one resource."""
    attributes = pairs(ROUTE if resource is None else resource)
    return json.dumps(
        {"resourceSpans": [{"resource": {"attributes": attributes}, "scopeSpans": [{"spans": list(spans)}]}]}
    ).encode()


def from_json(body: bytes) -> tuple[list[Span], Rejections]:
    rejections = Rejections()
    message = message_from_json(ExportTraceServiceRequest, body, rejections)
    return list(spans_of(message, rejections)), rejections


def decoded(request: ExportTraceServiceRequest) -> list[Span]:
    rejections = Rejections()
    spans = list(spans_of(ExportTraceServiceRequest.FromString(request.SerializeToString()), rejections))
    assert not rejections.spans
    return spans


def with_attribute(value: AnyValue) -> ExportTraceServiceRequest:
    """Return a request of one span with the attribute `key`."""
    request = request_of([Span.from_attributes(attributes={}, rollout_id="ro-1", attempt_id="at-1")])
    request.resource_spans[0].scope_spans[0].spans[0].attributes.append(KeyValue(key="key", value=value))
    return request


# --- the whole span ----------------------------------------------------------------------------------------------


def test_a_span_of_the_sdk_keeps_kind_scope_state_and_what_was_dropped() -> None:
    provider = TracerProvider(
        shutdown_on_exit=False, span_limits=SpanLimits(max_span_attributes=1, max_events=1, max_event_attributes=1)
    )
    tracer = provider.get_tracer("tool", "1.2", schema_url="https://example.org/1", attributes={"lang": "py"})
    with tracer.start_as_current_span("call", kind=SpanKind.CLIENT, attributes={"a": 1, "b": 2}) as live:
        live.add_event("first")
        live.add_event("second", {"x": 1, "y": 2})
    span = Span.from_opentelemetry(live, "ro-1", "at-1", 4)  # type: ignore[arg-type]
    assert span.dropped == DroppedCounts(attributes=1, events=1)
    assert span.events[0].dropped_attributes == 1
    [again] = decoded(request_of([span]))
    assert again.kind == "CLIENT"
    assert again.scope == {
        "name": "tool",
        "version": "1.2",
        "attributes": {"lang": "py"},
        "schema_url": "https://example.org/1",
    }
    assert again.dropped == DroppedCounts(attributes=1, events=1)
    assert again.flags == span.flags
    assert span.flags is not None
    assert span.flags & 0x301 == 0x101
    assert again.sequence_id == 4
    assert (again.trace_id, again.span_id, again.events) == (span.trace_id, span.span_id, span.events)


def test_every_field_of_a_decoded_span_is_set_and_valid() -> None:
    [span] = decoded(request_of([full_span()]))
    assert set(span.__dict__) == set(Span.model_fields) == span.model_fields_set
    assert Span.model_validate_json(span.model_dump_json()) == span


def full_span() -> Span:
    """Return a span with something in every field."""
    return Span(
        rollout_id="ro-1",
        attempt_id="at-1",
        sequence_id=7,
        trace_id=TRACE_ID,
        span_id=SPAN_ID,
        parent_id=PARENT_ID,
        name="call",
        status=TraceStatus(status_code="ERROR", description="no"),
        attributes={
            "text": "é",
            "yes": True,
            "n": -3,
            "x": 0.5,
            "tags": ["a", "b"],
            "empty": [],
            "zero": 0,
            "none": "",
        },
        events=[Event(name="e", attributes={"k": 1}, timestamp=1700000000.25, dropped_attributes=2)],
        links=[
            Link(
                context=SpanContext(trace_id=TRACE_ID, span_id=PARENT_ID, is_remote=True, trace_state={"v": "1"}),
                attributes={"l": 1},
                dropped_attributes=1,
                flags=0x301,
            )
        ],
        start_time=1700000000.123456,
        end_time=1700000001.0,
        context=SpanContext(trace_id=TRACE_ID, span_id=SPAN_ID, is_remote=False, trace_state={"a": "1", "b": "2"}),
        parent=None,
        resource=OtelResource(attributes={**ROUTE, "service.name": "agent"}, schema_url="https://example.org/2"),
        kind="PRODUCER",
        scope={"name": "lib", "version": None},
        dropped=DroppedCounts(attributes=1, events=2, links=3),
        flags=0x101,
    )


def test_a_full_span_comes_back_as_it_was() -> None:
    span = full_span()
    [again] = decoded(request_of([span]))
    span.attributes["agentlightning.span_sequence_id"] = 7
    assert again == span


texts = st.text(st.characters(codec="utf-8"), max_size=20)
scalars = st.one_of(texts, st.booleans(), st.integers(-(2**63) + 1, 2**63 - 1), st.floats(allow_nan=False))
values = st.one_of(
    scalars,
    st.lists(texts, max_size=4),
    st.lists(st.booleans(), max_size=4),
    st.lists(st.integers(-(2**63) + 1, 2**63 - 1), max_size=4),
    st.lists(st.floats(allow_nan=False), max_size=4),
)
attributes = st.dictionaries(texts, values, max_size=5)
times = st.one_of(st.none(), st.floats(1e9, 4e9))
words = st.text("abcdefgh0123", min_size=1, max_size=8)


@st.composite
def spans(draw: st.DrawFn) -> Span:
    trace_id, span_id = draw(st.binary(min_size=16, max_size=16)).hex(), draw(st.binary(min_size=8, max_size=8)).hex()
    state = draw(st.dictionaries(words, words, max_size=3))
    context = SpanContext(trace_id=trace_id, span_id=span_id, is_remote=False, trace_state=state)
    events = st.builds(Event, name=texts, attributes=attributes, timestamp=times, dropped_attributes=st.integers(0, 9))
    links = st.builds(
        Link,
        context=st.just(context),
        attributes=st.one_of(st.none(), attributes.filter(bool)),
        dropped_attributes=st.integers(0, 9),
        flags=st.sampled_from((None, 0x1, 0x101)),
    )
    dropped = st.builds(DroppedCounts, attributes=st.integers(0, 9), events=st.integers(0, 9), links=st.integers(1, 9))
    return Span(
        rollout_id=draw(st.sampled_from(("ro-1", "ro-2"))),
        attempt_id=draw(st.sampled_from(("at-1", "at-2"))),
        sequence_id=draw(st.integers(-1, 10**9)),
        trace_id=trace_id,
        span_id=span_id,
        parent_id=draw(st.one_of(st.none(), st.just(PARENT_ID))),
        name=draw(texts),
        status=TraceStatus(
            status_code=draw(st.sampled_from(("UNSET", "OK", "ERROR"))),
            description=draw(st.one_of(st.none(), texts.filter(bool))),
        ),
        attributes=draw(attributes),
        events=draw(st.lists(events, max_size=2)),
        links=draw(st.lists(links, max_size=2)),
        start_time=draw(times),
        end_time=draw(times),
        context=context,
        parent=None,
        resource=OtelResource(attributes=draw(attributes), schema_url=draw(texts)),
        kind=draw(st.sampled_from((None, "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER"))),
        scope=draw(st.sampled_from((None, {"name": "lib", "version": None}, {"name": "lib", "version": "2"}))),
        dropped=draw(st.one_of(st.none(), dropped)),
        flags=draw(st.sampled_from((None, 0x1, 0x301))),
    )


def as_sent(span: Span) -> Span:
    """Return what a span becomes on its way: its ids stand in its attributes too."""
    ids = {"agentlightning.rollout_id": span.rollout_id, "agentlightning.attempt_id": span.attempt_id}
    number = {"agentlightning.span_sequence_id": span.sequence_id} if span.sequence_id >= 0 else {}
    resource = OtelResource(attributes={**span.resource.attributes, **ids}, schema_url=span.resource.schema_url)
    return span.model_copy(update={"attributes": {**span.attributes, **number}, "resource": resource})


@given(st.lists(spans(), max_size=4))
def test_what_is_sent_arrives(sent: list[Span]) -> None:
    rejections = Rejections()
    arrived = list(spans_of(ExportTraceServiceRequest.FromString(encode_spans(sent)), rejections))
    assert not rejections.spans
    key = lambda span: span.model_dump_json()  # noqa: E731 -- sorts both sides the same way
    assert sorted(map(key, arrived)) == sorted(map(key, map(as_sent, sent)))


def test_spans_of_one_resource_keep_their_order() -> None:
    made = [
        Span.from_attributes(attributes={}, rollout_id="ro-1", attempt_id="at-1", sequence_id=-1, name=str(i))
        for i in range(5)
    ]
    assert [span.name for span in decoded(request_of(made))] == ["0", "1", "2", "3", "4"]


def test_a_span_with_ids_that_are_not_hexadecimal_is_named_when_it_is_sent() -> None:
    bad = Span.from_attributes(attributes={}, rollout_id="ro-1", attempt_id="at-1", trace_id="nothex", name="odd")
    with pytest.raises(BadRequestError, match="span 'odd'"):
        request_of([bad])


# --- values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (AnyValue(string_value=""), ""),
        (AnyValue(int_value=0), 0),
        (AnyValue(bool_value=False), False),
        (AnyValue(double_value=0.0), 0.0),
        (AnyValue(), "null"),
        (AnyValue(bytes_value=b"\x00\xff"), "AP8="),
        (AnyValue(array_value=ArrayValue()), []),
        (AnyValue(array_value=ArrayValue(values=[AnyValue(int_value=0), AnyValue(int_value=5)])), [0, 5]),
        (AnyValue(array_value=ArrayValue(values=[AnyValue(int_value=1), AnyValue(double_value=2.5)])), [1.0, 2.5]),
        (AnyValue(array_value=ArrayValue(values=[AnyValue(int_value=1), AnyValue(string_value="a")])), '[1, "a"]'),
        (AnyValue(array_value=ArrayValue(values=[AnyValue(int_value=1), AnyValue(bool_value=True)])), "[1, true]"),
        (AnyValue(array_value=ArrayValue(values=[AnyValue(string_value="a"), AnyValue()])), '["a", null]'),
        (AnyValue(array_value=ArrayValue(values=[AnyValue(bytes_value=b"a")])), ["YQ=="]),
        (AnyValue(array_value=ArrayValue(values=[AnyValue(array_value=ArrayValue())])), "[[]]"),
        (
            AnyValue(
                kvlist_value=KeyValueList(
                    values=[
                        KeyValue(key="a", value=AnyValue(int_value=1)),
                        KeyValue(key="b", value=AnyValue(bytes_value=b"a")),
                        KeyValue(key="c", value=AnyValue(double_value=float("inf"))),
                    ]
                )
            ),
            '{"a": 1, "b": "YQ==", "c": "Infinity"}',
        ),
    ],
)
def test_a_value_that_a_span_does_not_hold_becomes_json_text(value: AnyValue, expected: Any) -> None:
    [span] = decoded(with_attribute(value))
    assert span.attributes["key"] == expected
    assert type(span.attributes["key"]) is type(expected)
    Span.model_validate_json(span.model_dump_json())


def test_an_integer_beyond_64_bits_travels_as_text() -> None:
    sent = Span.from_attributes(attributes={"n": 2**70}, rollout_id="ro-1", attempt_id="at-1")
    [arrived] = decoded(request_of([sent]))
    assert arrived.attributes["n"] == str(2**70)


# --- whose span it is --------------------------------------------------------------------------------------------


def test_the_ids_of_the_span_go_before_those_of_its_resource() -> None:
    own = pairs({"agentlightning.rollout_id": "ro-9"})
    [span], _ = from_json(json_body({"traceId": TRACE_ID, "spanId": SPAN_ID, "attributes": own}))
    assert (span.rollout_id, span.attempt_id) == ("ro-9", "at-1")


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ({"intValue": "5"}, 5),
        ({"intValue": 0}, 0),
        ({"stringValue": "12"}, 12),
        ({"stringValue": "x"}, -1),
        ({"intValue": "-4"}, -1),
        ({"stringValue": "9" * 30}, -1),
        ({"boolValue": True}, -1),
    ],
)
def test_a_sequence_id_that_is_no_number_is_left_to_the_store(value: dict[str, Any], number: int) -> None:
    attribute = {"key": "agentlightning.span_sequence_id", "value": value}
    [span], _ = from_json(json_body({"traceId": TRACE_ID, "spanId": SPAN_ID, "attributes": [attribute]}))
    assert span.sequence_id == number


def test_a_span_without_an_attempt_is_rejected_by_itself_and_the_reason_names_it() -> None:
    own = pairs({"agentlightning.attempt_id": "at-1"})
    spans, rejections = from_json(
        json_body(
            {"name": "lost", "spanId": SPAN_ID},
            {"name": "kept", "spanId": PARENT_ID, "attributes": own},
            resource={"agentlightning.rollout_id": "ro-1"},
        )
    )
    assert [span.name for span in spans] == ["kept"]
    assert rejections.spans == 1
    assert "'lost' has no attribute agentlightning.attempt_id" in rejections.message


def test_short_ids_are_padded_and_long_ones_rejected() -> None:
    spans, rejections = from_json(
        json_body({"name": "short", "traceId": "ab", "spanId": ""}, {"name": "long", "spanId": SPAN_ID + "00"})
    )
    assert [(span.trace_id, span.span_id) for span in spans] == [("ab".zfill(32), "0" * 16)]
    assert "'long' has ids of 0, 9 and 0 bytes" in rejections.message


async def test_missing_numbers_are_asked_for_in_one_call() -> None:
    calls: list[list[tuple[str, str]]] = []

    async def issue(pairs: Sequence[tuple[str, str]]) -> list[int]:
        calls.append(list(pairs))
        return [7]

    request = request_of(
        [
            Span.from_attributes(attributes={}, rollout_id="ro-1", attempt_id="at-1", sequence_id=3),
            Span.from_attributes(attributes={}, rollout_id="ro-1", attempt_id="at-1", sequence_id=-1),
        ]
    )
    assert [span.sequence_id for span in await spans_from_proto(request, issue)] == [3, 7]
    assert calls == [[("ro-1", "at-1")]]


# --- OTLP/JSON ---------------------------------------------------------------------------------------------------


def test_both_forms_of_a_request_give_the_same_spans() -> None:
    body = json_body(
        {
            "traceId": TRACE_ID.upper(),
            "spanId": SPAN_ID,
            "parentSpanId": PARENT_ID,
            "traceState": "a=1,b=2",
            "flags": 257,
            "name": "call",
            "kind": 3,
            "startTimeUnixNano": "1700000000250000000",
            "endTimeUnixNano": 1700000001000000000,
            "attributes": [
                {"key": "n", "value": {"intValue": "-3"}},
                {"key": "x", "value": {"doubleValue": 1}},
                {"key": "nan", "value": {"doubleValue": "-Infinity"}},
                {"key": "b", "value": {"boolValue": False}},
                {"key": "raw", "value": {"bytesValue": "AP8="}},
                {"key": "list", "value": {"arrayValue": {"values": [{"stringValue": "a"}]}}},
                {"key": "none", "value": {"arrayValue": {}}},
                {"key": "kv", "value": {"kvlistValue": {"values": [{"key": "k", "value": {"intValue": 1}}]}}},
                {"key": "null", "value": None},
            ],
            "droppedAttributesCount": 2,
            "events": [{"timeUnixNano": "1700000000500000000", "name": "e", "unknownField": {"x": []}}],
            "links": [{"traceId": TRACE_ID, "spanId": PARENT_ID, "flags": 768}],
            "status": {"code": 2, "message": "no"},
        }
    )
    [span], rejections = from_json(body)
    assert not rejections.spans
    assert span.model_dump() == {
        **full_span().model_dump(),
        "sequence_id": -1,
        "attributes": {
            "n": -3,
            "x": 1.0,
            "nan": float("-inf"),
            "b": False,
            "raw": "AP8=",
            "list": ["a"],
            "none": [],
            "kv": '{"k": 1}',
            "null": "null",
        },
        "events": [{"name": "e", "attributes": {}, "timestamp": 1700000000.5, "dropped_attributes": 0}],
        "links": [
            {
                "context": {"trace_id": TRACE_ID, "span_id": PARENT_ID, "is_remote": True, "trace_state": {}},
                "attributes": None,
                "dropped_attributes": 0,
                "flags": 768,
            }
        ],
        "start_time": 1700000000.25,
        "resource": {"attributes": ROUTE, "schema_url": ""},
        "kind": "CLIENT",
        "scope": None,
        "dropped": {"attributes": 2, "events": 0, "links": 0},
    }


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("traceId", "xyz", "traceId is 'xyz'; expected hexadecimal text"),
        ("spanId", 5, "spanId is 5; expected hexadecimal text"),
        ("startTimeUnixNano", "soon", "startTimeUnixNano is 'soon'; expected a 64-bit integer"),
        ("startTimeUnixNano", 1.5, "expected a 64-bit integer"),
        ("startTimeUnixNano", 1e300, "expected a 64-bit integer"),
        ("name", ["a"], "name is a list; expected a string"),
        ("attributes", {}, "attributes must be a list; got an object"),
        ("status", 2, "Status must be an object; got 2"),
        ("kind", 2**40, "malformed span"),
        ("droppedLinksCount", -1, "malformed span"),
    ],
)
def test_a_malformed_span_costs_only_itself(field: str, value: Any, reason: str) -> None:
    good = {"name": "good", "traceId": TRACE_ID, "spanId": SPAN_ID}
    spans, rejections = from_json(json_body({**good, field: value}, good))
    assert [span.name for span in spans] == ["good"]
    assert rejections.spans == 1
    assert reason in rejections.message


@pytest.mark.parametrize("body", [b"[]", b"{", b"\xff", b'{"resourceSpans": 5}', b'"\\ud800"', b"[" * 5000])
def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequestError, match="Unable to parse OTLP traces payload"):
        parse_body(ExportTraceServiceRequest, body, JSON_CT, "", "traces", Rejections())


keys = st.sampled_from(
    (
        *("resource", "spans", "traceId", "name", "kind", "startTimeUnixNano", "status", "code", "events", "links"),
        *("attributes", "key", "value", "intValue", "stringValue", "arrayValue", "values", "kvlistValue", "bytesValue"),
    )
)
leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts)
anything = st.recursive(leaves, lambda inner: st.one_of(st.lists(inner), st.dictionaries(keys, inner)), max_leaves=12)


@given(anything)
def test_any_json_is_spans_or_rejected_or_a_bad_request(value: Any) -> None:
    body = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [value]}], "resource": {"attributes": value}}]})
    for sent in (body, body.replace('"attributes"', '"x"', 1), json.dumps(value)):
        try:
            spans, _ = from_json(sent.encode())
        except BadRequestError:
            continue
        for span in spans:
            Span.model_validate_json(span.model_dump_json())


def test_only_a_few_reasons_are_kept() -> None:
    rejections = Rejections()
    for index in range(1000):
        rejections.add(f"reason {index} " + "x" * 10_000)
    rejections.add("reason 0 " + "x" * 10_000, 5)
    assert rejections.spans == 1005
    assert len(rejections.message) < 2000
    assert "(6 spans)" in rejections.message
    assert rejections.message.endswith("other reasons (995)")


# --- the body ----------------------------------------------------------------------------------------------------


def test_an_empty_body_is_an_empty_export() -> None:
    assert parse_body(ExportTraceServiceRequest, b"", PROTOBUF_CT, "", "traces", Rejections()) == (
        ExportTraceServiceRequest()
    )


def test_bytes_that_are_no_protobuf_are_refused() -> None:
    with pytest.raises(BadRequestError, match="Unable to parse OTLP traces payload"):
        parse_body(ExportTraceServiceRequest, b"\xff\xff\xff", PROTOBUF_CT, "", "traces", Rejections())


def test_gzip_is_unpacked_in_one_part_or_several() -> None:
    assert unpacked(gzip.compress(b"one") + gzip.compress(b"two"), "gzip") == b"onetwo"
    assert unpacked(b"plain", "identity") == b"plain"


def test_a_bomb_is_stopped_at_the_bound() -> None:
    bomb = gzip.compress(bytes(50_000_000))
    with pytest.raises(TooLargeError, match="unpacks to more than 33554432 bytes"):
        unpacked(bomb, "gzip")
    with pytest.raises(TooLargeError):
        unpacked(gzip.compress(bytes(600)) * 2, "gzip", limit=1000)
    assert len(unpacked(gzip.compress(bytes(1000)), "gzip", limit=1000)) == 1000


@pytest.mark.parametrize("body", [b"not gzip", gzip.compress(b"cut off", mtime=0)[:-4], b""])
def test_broken_gzip_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(BadRequestError, match="Unable to unpack the gzip body"):
        unpacked(body, "gzip")


def test_other_encodings_and_types_are_named_with_what_was_expected() -> None:
    with pytest.raises(UnsupportedMediaError, match="Unsupported Content-Encoding 'br', expected 'gzip'"):
        unpacked(b"", "br")
    with pytest.raises(UnsupportedMediaError, match="Unsupported Content-Type 'text/plain', expected"):
        form_of("text/plain; charset=utf-8")
    assert form_of("Application/JSON; charset=utf-8") == JSON_CT
    assert form_of("application/x-protobuf") == PROTOBUF_CT
