"""OTLP into the store server: protobuf requests of 512 spans, as an exporter of OpenTelemetry sends them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue

from agentlightning.store.client_server import LightningStoreClient
from agentlightning.types import Attempt
from bench.store_children import Child, Part
from bench.store_figures import Figure
from bench.store_server import BareConnection, StoreServer
from bench.store_spans import ATTRIBUTES

BATCH = 512
_OLDER = 7_000


class Sender(Part):
    """A process that exports batches of spans, one after another."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    async def open(self) -> None:
        host, _, port = self._endpoint.removeprefix("http://").rpartition(":")
        self._connection = BareConnection(host, int(port))
        self._bodies: list[bytes] = []
        self._batches = 0

    async def close(self) -> None:
        await self._connection.close()

    async def prepare(self, requests: int) -> None:
        """Encode the next requests, all of one new attempt."""
        store = LightningStoreClient(self._endpoint)
        claim = await store.start_rollout({"task": 1}, worker_id="w")
        await store.close()
        self._bodies = [export_request(claim.attempt, self._batches + n) for n in range(requests)]
        self._batches += requests

    async def send(self) -> float:
        """Send the prepared requests; return the seconds."""
        began = time.perf_counter()
        for body in self._bodies:
            await self._connection.request("POST", "/v1/traces", body, "application/x-protobuf")
        return time.perf_counter() - began


def export_request(attempt: Attempt, number: int) -> bytes:
    """Return an encoded export of 512 spans of an attempt."""
    message, now = ExportTraceServiceRequest(), time.time_ns()
    resource = message.resource_spans.add()
    resource.resource.attributes.extend(
        _attribute(key, value)
        for key, value in {
            "service.name": "agent",
            "agentlightning.rollout_id": attempt.rollout_id,
            "agentlightning.attempt_id": attempt.attempt_id,
        }.items()
    )
    scope = resource.scope_spans.add()
    scope.scope.name = "agent"
    attributes = [_attribute(key, value) for key, value in ATTRIBUTES.items()]
    for index in range(BATCH):
        span = scope.spans.add()
        span.trace_id = (number + 1).to_bytes(16, "big")
        span.span_id = (number * BATCH + index + 1).to_bytes(8, "big")
        span.name, span.kind = "openai.chat.completion", 1
        span.start_time_unix_nano, span.end_time_unix_nano = now, now + 100_000_000
        span.attributes.extend(attributes)
        span.status.code = 1
    return message.SerializeToString()


def _attribute(key: str, value: Any) -> KeyValue:
    return KeyValue(key=key, value=_value(value))


def _value(value: Any) -> AnyValue:
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    return AnyValue(array_value=ArrayValue(values=[_value(item) for item in value]))


async def _accepted(endpoint: str) -> bool:
    host, _, port = endpoint.removeprefix("http://").rpartition(":")
    connection = BareConnection(host, int(port))
    try:
        await connection.request("POST", "/v1/traces", b"", "application/x-protobuf")
    except AssertionError:
        return False
    finally:
        await connection.close()
    return True


def measure_otlp(quick: bool) -> list[Figure]:
    """Measure one sender, and four at once."""
    figures: list[Figure] = []
    with Child(StoreServer, "memory") as server:
        if not asyncio.run(_accepted(server.opened)):
            return [Figure("otlp: spans per s", None, 3 * _OLDER, older=_OLDER, note="the server has no /v1/traces")]
        for senders in (1, 4):
            rate, server_us = _measure(server, senders, (4 if quick else 24) // senders)
            name = f"otlp: spans per s, {senders} sender{'s' if senders > 1 else ''}"
            note = f"server CPU {server_us:.0f} us per span"
            figures.append(Figure(name, rate, 3 * _OLDER, older=_OLDER, note=note))
    return figures


def _measure(server: Child, senders: int, requests: int) -> tuple[float, float]:
    children = [Child(Sender, server.opened) for _ in range(senders)]
    try:
        for child in children:
            child.call("prepare", requests)
        before = server.cpu_seconds()
        for child in children:
            child.ask("send")
        seconds = max(child.answer() for child in children)
        spans = senders * requests * BATCH
        return spans / seconds, 1e6 * (server.cpu_seconds() - before) / spans
    finally:
        for child in children:
            child.end()
