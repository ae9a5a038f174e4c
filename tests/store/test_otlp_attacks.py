"""OTLP requests that are small on the wire and large behind it: refused before they are made, or made in pieces."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any, cast

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agentlightning.errors import BadRequestError, BusyError, TooLargeError
from agentlightning.store.client_server import LightningStoreServer
from agentlightning.utils.http.byte_budget import ByteBudget
from agentlightning.utils.otlp import Rejections, unpacked, unread_steps_of
from agentlightning.utils.otlp.caps import MAX_MESSAGES, MAX_PARTS, MAX_RECORDS, MAX_SHARED_BYTES, check_protobuf
from tests.store.conftest import Serve
from tests.stubs.raw_http import Answer, exchange, request

MIB = 2**20
PROTOBUF, JSON = "application/x-protobuf", "application/json"


def field(number: int, content: bytes) -> bytes:
    """Return a length-delimited field of protobuf."""
    size, length = len(content), b""
    while size >= 0x80:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


def within(*numbers: int, content: bytes) -> bytes:
    """Return content inside messages, the outermost first."""
    for number in reversed(numbers):
        content = field(number, content)
    return content


EMPTY_RECORDS = within(1, 2, content=b"\x12\x00" * (MAX_RECORDS + 1))
MESSAGES = MAX_MESSAGES + 1
TOO_MANY: dict[str, tuple[str, bytes]] = {
    "spans": ("traces", EMPTY_RECORDS),
    "metrics": ("metrics", EMPTY_RECORDS),
    "log records": ("logs", EMPTY_RECORDS),
    "spans in many scopes": ("traces", within(1, content=field(2, b"\x12\x00") * (MAX_RECORDS + 1))),
    "scopes": ("traces", within(1, content=b"\x12\x00" * MESSAGES)),
    "resources": ("traces", b"\x0a\x00" * MESSAGES),
    "attributes of a resource": ("traces", within(1, 1, content=b"\x0a\x00" * MESSAGES)),
    "attributes of a scope": ("logs", within(1, 2, 1, content=b"\x1a\x00" * MESSAGES)),
    "attributes of a span": ("traces", within(1, 2, 2, content=b"\x4a\x00" * MESSAGES)),
    "events": ("traces", within(1, 2, 2, content=b"\x5a\x00" * MESSAGES)),
    "links": ("traces", within(1, 2, 2, content=b"\x6a\x00" * MESSAGES)),
    "attributes of an event": ("traces", within(1, 2, 2, 11, content=b"\x1a\x00" * MESSAGES)),
    "data points": ("metrics", within(1, 2, 2, 5, content=b"\x0a\x00" * MESSAGES)),
}
KINDS: dict[str, Any] = {
    "traces": ExportTraceServiceRequest,
    "metrics": ExportMetricsServiceRequest,
    "logs": ExportLogsServiceRequest,
}


@pytest.fixture
async def server(serve: Serve) -> LightningStoreServer:
    return (await serve())[0]


async def export(
    server: LightningStoreServer, signal: str, body: bytes, kind: str = PROTOBUF, **headers: str
) -> Answer:
    request_bytes = request("POST", f"/v1/{signal}", body, content_type=kind, **headers)
    return await exchange(server.server_launcher.port, request_bytes)


@pytest.mark.parametrize("what", TOO_MANY)
def test_too_many_messages_are_seen_before_any_is_made(what: str) -> None:
    signal, body = TOO_MANY[what]
    with pytest.raises(TooLargeError, match="more than"):
        check_protobuf(KINDS[signal], body)


@pytest.mark.parametrize("signal", KINDS)
async def test_a_small_body_of_millions_of_records_is_413(server: LightningStoreServer, signal: str) -> None:
    body = gzip.compress(within(1, 2, content=b"\x12\x00" * 7_500_000))
    assert len(body) < 20_000
    answer = await export(server, signal, body, content_encoding="gzip")
    assert answer.status == 413
    assert f"more than {MAX_RECORDS} records".encode() in gzip.decompress(answer.body)


async def test_json_has_the_same_bounds(server: LightningStoreServer) -> None:
    spans: Any = {"resourceSpans": [{"scopeSpans": [{"spans": [cast(Any, {})] * (MAX_RECORDS + 1)}]}]}
    answer = await export(server, "traces", json.dumps(spans).encode(), JSON)
    assert (answer.status, answer.json["message"].split(";")[0]) == (
        413,
        f"The request holds more than {MAX_RECORDS} records",
    )
    points: Any = {"resourceMetrics": [{"x": [cast(Any, [])] * MESSAGES}]}
    packed = gzip.compress(json.dumps(points, separators=(",", ":")).encode())
    assert (await export(server, "metrics", packed, JSON, content_encoding="gzip")).status == 413


async def test_spans_that_are_all_rejected_leave_turns_to_others_too() -> None:
    message = ExportTraceServiceRequest.FromString(within(1, 2, content=b"\x12\x00" * 10_000))
    rejections = Rejections()
    counts = [rejections.spans for _ in unread_steps_of(message, rejections, read_all=True)]
    assert rejections.spans == 10_000
    assert max(after - before for before, after in zip([0, *counts], [*counts, 10_000], strict=True)) <= 128


async def test_a_span_of_too_many_parts_is_rejected_and_the_others_are_stored(server: LightningStoreServer) -> None:
    rollout = await server.start_rollout(input={})
    message = ExportTraceServiceRequest()
    group = message.resource_spans.add()
    for key, value in (("rollout_id", rollout.rollout_id), ("attempt_id", rollout.attempt.attempt_id)):
        group.resource.attributes.add(key=f"agentlightning.{key}").value.string_value = value
    spans = group.scope_spans.add().spans
    for number in (1, 2):
        span = spans.add(name=f"s{number}", span_id=bytes([number]) * 8, trace_id=b"t" * 16)
        if number == 1:
            for _ in range(MAX_PARTS + 1):
                span.events.add()
    answer = await export(server, "traces", message.SerializeToString())
    assert (answer.status, b"attributes, events and links" in answer.body) == (200, True)
    stored = await server.query_spans(rollout.rollout_id)
    assert [span.name for span in stored] == ["s2"]


def test_a_resource_is_not_copied_without_end() -> None:
    message = ExportTraceServiceRequest()
    group = message.resource_spans.add()
    group.resource.attributes.add(key="x").value.string_value = "y" * MIB
    group.scope_spans.add().spans.extend(
        ExportTraceServiceRequest.FromString(within(1, 2, content=b"\x12\x00" * 100))
        .resource_spans[0]
        .scope_spans[0]
        .spans
    )
    rejections = Rejections()
    assert [span for step in unread_steps_of(message, rejections, read_all=True) for span in step] == []
    assert (rejections.spans, str(MAX_SHARED_BYTES) in rejections.message) == (100, True)


def test_what_a_body_unpacks_to_is_counted_as_it_comes_out() -> None:
    bomb = gzip.compress(b" " * (16 * MIB))
    with ByteBudget(4 * MIB).hold("someone", 4 * MIB) as hold:
        with pytest.raises(BusyError):
            unpacked(bomb, "gzip", hold=hold)
        assert hold.size <= 4 * MIB


def test_many_members_of_gzip_are_refused_and_a_few_are_one_body() -> None:
    assert unpacked(gzip.compress(b"ab") * 3, "gzip") == b"ababab"
    with pytest.raises(BadRequestError, match="members"):
        unpacked(gzip.compress(b"") * 2000, "gzip")
    with pytest.raises(TooLargeError):
        unpacked(gzip.compress(b"a" * 100) * 10, "gzip", limit=999)


@pytest.mark.parametrize("depth", [90, 5000])
@pytest.mark.parametrize("form", [PROTOBUF, JSON])
async def test_values_in_values_without_end_are_no_fault(server: LightningStoreServer, depth: int, form: str) -> None:
    value = b""
    for _ in range(depth if form == PROTOBUF else 0):
        value = field(5, field(1, value))  # AnyValue.array_value.values
    body = within(1, 1, 1, content=field(1, b"k") + field(2, value))
    if form == JSON:
        deep = '{"arrayValue":{"values":[' * depth + "{}" + "]}}" * depth
        body = ('{"resourceSpans":[{"resource":{"attributes":[{"key":"k","value":' + deep + "}]}}]}").encode()
    assert (await export(server, "traces", body, form)).status in (200, 400)


async def test_health_is_answered_while_large_requests_are_worked_on(server: LightningStoreServer) -> None:
    """A thread makes or refuses these, not the loop: the loop gives each answer in between."""
    events = within(1, 2, 2, content=b"\x5a\x00" * 900_000)
    work = [
        asyncio.create_task(export(server, "traces", gzip.compress(events), content_encoding="gzip")) for _ in range(4)
    ]
    answered = 0
    while not all(task.done() for task in work):
        assert (await exchange(server.server_launcher.port, request("GET", "/health"))).status == 200
        answered += 1
    assert answered >= 4
    assert {task.result().status for task in work} == {200}
