"""OTLP over a real socket: both forms, partial success, answers that ask for a retry; bad input is never a 500."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import pytest
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from typing_extensions import override

from agentlightning.errors import BusyError, StoreUnreachableError, StoreWriteError
from agentlightning.store.http.otlp import otlp_routes, store_spans
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import AttemptedRollout, Span
from agentlightning.utils.otlp import JSON_CT, PROTOBUF_CT, Rejections, encode_spans, handle_otlp_export
from agentlightning.utils.server_launcher import PythonServerLauncher, PythonServerLauncherArgs
from tests.store.conftest import Serve
from tests.store.parts import required, span_of


class Store(InMemoryLightningStore):
    """A memory store whose next span batches may be made to fail, and which counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[Exception] = []
        self.batches = 0

    @override
    async def add_many_spans(self, spans: Sequence[Span]) -> list[Span]:
        self.batches += 1
        if self.faults:
            raise self.faults.pop(0)
        return await super().add_many_spans(spans)


class Served:
    """A store behind its OTLP end points, and a sender."""

    def __init__(self, store: Store, endpoint: str, session: aiohttp.ClientSession) -> None:
        self.store, self.endpoint, self.session = store, endpoint, session

    async def post(self, body: Any, path: str = "/v1/traces", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Send a body; header names are given with underscores."""
        named = {"content-type": PROTOBUF_CT, "accept-encoding": "identity"}
        named.update({key.replace("_", "-"): value for key, value in headers.items()})
        data = io.BytesIO(body) if isinstance(body, bytes) else body
        async with self.session.post(self.endpoint + path, data=data, headers=named) as reply:
            return reply.status, {key.lower(): value for key, value in reply.headers.items()}, await reply.read()

    async def rejected(self, body: bytes) -> tuple[int, str]:
        """Send a protobuf request that is answered 200 and return its partial success."""
        status, headers, reply = await self.post(body)
        assert (status, headers["content-type"]) == (200, PROTOBUF_CT)
        partial = ExportTraceServiceResponse.FromString(reply).partial_success
        return partial.rejected_spans, partial.error_message


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    store = Store()
    server = PythonServerLauncher(
        Starlette(routes=otlp_routes(lambda: store)), PythonServerLauncherArgs(launch_mode="asyncio")
    )
    await server.start()
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        yield Served(store, server.endpoint, session)
    await server.stop()
    await store.close()


async def names(store: Store, attempted: AttemptedRollout) -> list[str]:
    return [span.name for span in await store.query_spans(attempted.rollout_id)]


# --- what is stored ----------------------------------------------------------------------------------------------


async def test_spans_are_stored_in_order_and_numbered_by_the_store_where_they_bring_no_number(served: Served) -> None:
    attempted = await served.store.start_rollout(input={})
    sent = [span_of(attempted, "a"), span_of(attempted, "b", number=40), span_of(attempted, "c")]
    status, headers, reply = await served.post(encode_spans(sent))
    assert (status, headers["content-type"], reply) == (200, PROTOBUF_CT, b"")
    spans = await served.store.query_spans(attempted.rollout_id)
    assert [(one.name, one.sequence_id) for one in spans] == [("a", 1), ("b", 40), ("c", 41)]
    assert required(await served.store.get_latest_attempt(attempted.rollout_id)).status == "running"


async def test_a_large_request_is_stored_in_steps_that_let_others_in(served: Served) -> None:
    attempted = await served.store.start_rollout(input={})
    assert await served.rejected(encode_spans([span_of(attempted) for _ in range(1000)])) == (0, "")
    assert len(await names(served.store, attempted)) == 1000
    assert served.store.batches == 8


async def test_a_large_compressed_body_arrives_whole(served: Served) -> None:
    attempted = await served.store.start_rollout(input={})
    sent = [span_of(attempted, "x" * 5000) for _ in range(600)]
    body = encode_spans(sent)
    assert len(body) > 3_000_000
    assert (await served.post(body))[0] == 200
    again = await served.store.start_rollout(input={})
    body = encode_spans([span_of(again, "x" * 5000) for _ in range(600)])
    assert (await served.post(gzip.compress(body, 0), content_encoding="gzip"))[0] == 200
    assert len(await names(served.store, attempted)) == len(await names(served.store, again)) == 600


async def test_json_is_answered_in_json(served: Served) -> None:
    attempted = await served.store.start_rollout(input={})
    ids = {"agentlightning.rollout_id": attempted.rollout_id, "agentlightning.attempt_id": attempted.attempt.attempt_id}
    resource = {"attributes": [{"key": key, "value": {"stringValue": value}} for key, value in ids.items()]}
    spans = [{"name": "a", "traceId": "ab" * 16, "spanId": "cd" * 8}, {"name": "b", "traceId": "no hex"}]
    body = {"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": spans}]}]}
    status, headers, reply = await served.post(json.dumps(body), content_type="application/json; charset=utf-8")
    assert (status, headers["content-type"]) == (200, JSON_CT)
    partial = json.loads(reply)["partialSuccess"]
    assert partial["rejectedSpans"] == "1"
    assert "traceId is 'no hex'" in partial["errorMessage"]
    assert await names(served.store, attempted) == ["a"]


# --- what is rejected --------------------------------------------------------------------------------------------


async def test_spans_of_unknown_rollouts_and_attempts_are_rejected_and_the_others_stored(served: Served) -> None:
    one, two = await served.store.start_rollout(input={}), await served.store.start_rollout(input={})
    sent = [
        span_of(one, "a"),
        span_of(one, "lost", rollout_id="ro-none"),
        span_of(two, "b"),
        span_of(two, "lost", attempt_id="at-none"),
        span_of(two, "lost", attempt_id="at-none"),
        span_of(one, "c"),
        span_of(one, "lost", rollout_id=""),
    ]
    count, message = await served.rejected(encode_spans(sent))
    assert count == 4
    assert "Rollout ro-none not found" in message
    assert f"Attempt at-none not found for rollout {two.rollout_id} (2 spans)" in message
    assert "has no attribute agentlightning.rollout_id" in message
    assert await names(served.store, one) == ["a", "c"]
    assert await names(served.store, two) == ["b"]


async def test_a_span_that_the_store_refuses_costs_only_itself(served: Served) -> None:
    attempted = await served.store.start_rollout(input={})
    whole_batch_then_first_span = [ValueError("no room for this one"), ValueError("no room for this one")]
    served.store.faults = list(whole_batch_then_first_span)
    count, message = await served.rejected(encode_spans([span_of(attempted, "a"), span_of(attempted, "b")]))
    assert (count, message) == (1, "no room for this one")
    assert await names(served.store, attempted) == ["b"]


# --- who tries again ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "status", "pause"),
    [
        (BusyError("the store is full", retry_after=7.0), 429, "7"),
        (StoreUnreachableError("no answer"), 503, "5"),
        (StoreWriteError("disk full"), 503, "5"),
        (KeyError("a bug"), 503, "5"),
    ],
)
async def test_a_sender_is_told_to_try_again_when_it_is_not_its_fault(
    served: Served, fault: Exception, status: int, pause: str
) -> None:
    attempted = await served.store.start_rollout(input={})
    body = encode_spans([span_of(attempted, "a")])
    served.store.faults = [fault]
    answered, headers, reply = await served.post(body)
    assert (answered, headers["retry-after"]) == (status, pause)
    assert Status.FromString(reply).message
    assert b"Traceback" not in reply
    assert await served.rejected(body) == (0, "")
    assert await names(served.store, attempted) == ["a"]


# --- bad requests ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "headers", "status", "message"),
    [
        (b"\xff\xff", {}, 400, "Unable to parse OTLP traces payload"),
        (b"[", {"content_type": JSON_CT}, 400, "Unable to parse OTLP traces payload"),
        (b"", {"content_type": "text/plain"}, 415, "Unsupported Content-Type 'text/plain'"),
        (b"x", {"content_encoding": "zstd"}, 415, "Unsupported Content-Encoding 'zstd'"),
        (b"no gzip", {"content_encoding": "gzip"}, 400, "Unable to unpack the gzip body"),
        (gzip.compress(bytes(40_000_000)), {"content_encoding": "gzip"}, 413, "unpacks to more than"),
    ],
)
async def test_a_bad_request_is_told_why(
    served: Served, body: bytes, headers: dict[str, str], status: int, message: str
) -> None:
    answered, reply_headers, reply = await served.post(body, **headers)
    assert answered == status
    text = (
        json.loads(reply)["message"] if reply_headers["content-type"] == JSON_CT else Status.FromString(reply).message
    )
    assert message in text
    assert "retry-after" not in reply_headers


async def test_a_body_beyond_the_bound_is_413_whether_its_length_is_told_or_not(served: Served) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield bytes(1_000_000)

    reader, writer = await _raw(served, b"Content-Length: 40000000\r\n")
    assert b" 413 " in await reader.readline()
    writer.close()
    assert (await served.post(chunks()))[0] == 413


async def test_a_reply_is_compressed_when_the_sender_can_read_it(served: Served) -> None:
    attempted = await served.store.start_rollout(input={})
    body = gzip.compress(encode_spans([span_of(attempted, "a")]))
    status, headers, reply = await served.post(body, content_encoding="gzip", accept_encoding="gzip, deflate")
    assert (status, headers["content-encoding"], gzip.decompress(reply)) == (200, "gzip", b"")
    unsaid = {"content-type": PROTOBUF_CT, "content-encoding": "gzip"}
    url = f"{served.endpoint}/v1/traces"
    async with served.session.post(url, data=body, headers=unsaid, skip_auto_headers=["Accept-Encoding"]) as answer:
        assert (answer.status, answer.headers["content-encoding"]) == (200, "gzip")
    _, headers, _ = await served.post(body, content_encoding="gzip")  # which accepts "identity" alone
    assert "content-encoding" not in headers
    _, headers, reply = await served.post(b"\xff", accept_encoding="gzip, deflate")
    assert headers["content-encoding"] == "gzip"
    assert "Unable to parse" in Status.FromString(gzip.decompress(reply)).message


@pytest.mark.parametrize(
    ("path", "message"),
    [("/v1/metrics", ExportMetricsServiceRequest()), ("/v1/logs", ExportLogsServiceRequest())],
)
async def test_metrics_and_logs_are_accepted(served: Served, path: str, message: Any) -> None:
    for body in (message.SerializeToString(), b""):
        status, headers, reply = await served.post(body, path)
        assert (status, headers["content-type"], reply) == (200, PROTOBUF_CT, b"")
    status, _, reply = await served.post(b"{}", path, content_type=JSON_CT)
    assert (status, json.loads(reply)) == (200, {})
    assert (await served.post(b"\xff", path))[0] == 400


async def test_any_signal_can_be_answered_with_a_callback() -> None:
    messages: list[ExportLogsServiceRequest] = []

    async def take(message: ExportLogsServiceRequest) -> None:
        messages.append(message)
        if message.resource_logs:
            raise BusyError("later", retry_after=2.0)

    async def logs(request: Request) -> Response:
        return await handle_otlp_export(request, ExportLogsServiceRequest, ExportLogsServiceResponse, take, "logs")

    server = PythonServerLauncher(
        Starlette(routes=[Route("/logs", logs, methods=["POST"])]), PythonServerLauncherArgs(launch_mode="asyncio")
    )
    await server.start()
    async with aiohttp.ClientSession(server.endpoint) as session:
        for body, status in (({}, 200), ({"resourceLogs": [{"schemaUrl": "x"}]}, 429)):
            async with session.post("/logs", json=body) as reply:
                assert reply.status == status
    await server.stop()
    assert [len(message.resource_logs) for message in messages] == [0, 1]


async def _raw(served: Served, header: bytes) -> Any:
    host, port = served.endpoint.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\n" + header + b"\r\n")
    return reader, writer


# --- spans that are kept as they came --------------------------------------------------------------------------------


def export(attempted: AttemptedRollout, late: AttemptedRollout) -> bytes:
    """Return a request with what OTLP has: ids in the resource and in spans, events, links, values of every kind."""
    request = ExportTraceServiceRequest()
    values: dict[str, Any] = {
        "text": AnyValue(string_value="Grüße"),
        "empty": AnyValue(string_value=""),
        "number": AnyValue(int_value=-(2**62)),
        "odd": AnyValue(double_value=math.inf),
        "no": AnyValue(bool_value=False),
        "bytes": AnyValue(bytes_value=b"\xff"),
        "mixed": AnyValue(array_value=ArrayValue(values=[AnyValue(int_value=1), AnyValue(string_value="a")])),
        "nothing": AnyValue(),
    }
    attributes = [KeyValue(key=key, value=value) for key, value in values.items()]
    for owner, in_resource in ((attempted, True), (late, True), (attempted, False)):
        ids = [
            KeyValue(key="agentlightning.rollout_id", value=AnyValue(string_value=owner.rollout_id)),
            KeyValue(key="agentlightning.attempt_id", value=AnyValue(string_value=owner.attempt.attempt_id)),
        ]
        group = request.resource_spans.add(schema_url="https://schema")
        group.resource.attributes.extend([*ids, *attributes[:1]] if in_resource else attributes[1:2])
        scoped = group.scope_spans.add(schema_url="https://scope")
        scoped.scope.name, scoped.scope.version = "library", "1"
        for number in range(3):
            span = scoped.spans.add(
                trace_id=b"t" * 16,
                span_id=f"{len(request.resource_spans)}{number}".encode(),
                parent_span_id=b"p" if number else b"",
                trace_state="a=b",
                name=f"span {number}",
                kind=number,
                start_time_unix_nano=1_700_000_000_123_456_789,
                end_time_unix_nano=0,
                dropped_events_count=number,
                flags=0x301,
            )
            span.attributes.extend([*attributes, *([] if in_resource else ids)])
            span.status.code, span.status.message = number, "why" * number
            span.events.add(name="event", time_unix_nano=5, attributes=attributes[:3])
            span.links.add(trace_id=b"l" * 16, span_id=b"s" * 8, attributes=attributes[3:5], flags=0x300)
        scoped.spans[-1].attributes.append(
            KeyValue(key="agentlightning.span_sequence_id", value=AnyValue(int_value=40 + len(request.resource_spans)))
        )
    broken = request.resource_spans[0].scope_spans[0].spans
    broken.add(name="long id", span_id=b"x" * 9)
    request.resource_spans.add().scope_spans.add().spans.add(name="of nobody")
    return request.SerializeToString()


async def test_spans_that_are_kept_as_they_came_are_read_as_if_they_had_been_read_at_once(serve: Serve) -> None:
    answers: list[list[dict[str, Any]]] = []
    bodies: list[bytes] = []
    for store in (InMemoryLightningStore(), Store()):
        server, client = await serve(store)
        attempted, late = await store.start_rollout(input={}), await store.start_rollout(input={})
        await store.update_attempt(late.rollout_id, late.attempt.attempt_id, status="succeeded")
        body = export(attempted, late)
        async with aiohttp.ClientSession() as session:
            for _ in range(2):  # a request that is repeated is stored once
                url = server.endpoint + "/v1/traces"
                async with session.post(url, data=body, headers={"content-type": PROTOBUF_CT}) as reply:
                    bodies.append(await reply.read())
        for reader, owner in ((store, attempted), (store, late), (client, attempted), (client, late)):
            spans = await reader.query_spans(owner.rollout_id, owner.attempt.attempt_id)
            assert (await reader.query_spans(owner.rollout_id, span_id=spans[1].span_id)).items == [spans[1]]
            assert (await reader.query_spans(owner.rollout_id, limit=1, offset=2)).items == [spans[2]]
            text = json.dumps([span.model_dump(mode="json") for span in spans], sort_keys=True)
            text = text.replace(owner.rollout_id, "rollout").replace(owner.attempt.attempt_id, "attempt")
            answers.append(json.loads(text))
        assert (await store.statistics())["total_spans"] == 9
    assert answers[:4] == answers[4:]
    assert answers[0] == answers[2]
    assert [len(spans) for spans in answers] == [6, 3] * 4
    assert [span["sequence_id"] for span in answers[0]] == [1, 2, 41, 42, 43, 43]
    assert {span["attributes"].get("agentlightning.stale") for span in answers[1]} == {True}
    assert bodies[:2] == bodies[2:]
    partial = ExportTraceServiceResponse.FromString(bodies[0]).partial_success
    assert partial.rejected_spans == 2


async def test_what_spans_share_counts_for_the_bound_of_the_store(serve: Serve) -> None:
    store = InMemoryLightningStore(max_span_bytes=200_000)
    server, _ = await serve(store)
    attempted = await store.start_rollout(input={})
    request = ExportTraceServiceRequest.FromString(export(attempted, attempted))
    del request.resource_spans[1:]
    request.resource_spans[0].resource.attributes.append(KeyValue(key="k", value=AnyValue(string_value="x" * 100_000)))
    async with aiohttp.ClientSession() as session:
        url, headers = server.endpoint + "/v1/traces", {"content-type": PROTOBUF_CT}
        async with session.post(url, data=request.SerializeToString(), headers=headers) as reply:
            assert reply.status == 429


async def test_what_is_done_to_a_span_that_was_read_changes_nothing_in_the_store() -> None:
    store = InMemoryLightningStore()
    claim = await store.start_rollout({"x": 1})
    span = span_of(claim, number=1)
    span.resource.attributes["of"] = ["all"]
    span.scope = {"name": "mine", "attributes": {"b": 1}}
    message = ExportTraceServiceRequest.FromString(encode_spans([span]))
    await store_spans(store, message, Rejections())
    (first,) = await store.query_spans(claim.rollout_id)
    first.resource.attributes["of"].append("none")  # type: ignore[union-attr]
    first.resource.attributes["other"] = 1
    assert first.scope is not None
    first.scope["attributes"]["b"] = 2
    (second,) = await store.query_spans(claim.rollout_id)
    assert second.resource.attributes["of"] == ["all"]
    assert "other" not in second.resource.attributes
    assert second.scope is not None
    assert second.scope["attributes"] == {"b": 1}
