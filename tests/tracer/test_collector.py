"""The collector that the environment names, and the message when it is unusable. gRPC against a real server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from agentlightning.errors import MissingExtraError
from agentlightning.tracer.collector import Collector, collector_of
from agentlightning.tracer.mirror import Mirror
from agentlightning.tracer.senders import sender_to
from tests.tracer.test_mirror import some_spans

ENDPOINT = "AGENT_LIGHTNING_OTLP_ENDPOINT"


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        (" https://otel.example/ ", "https://otel.example/v1/traces"),
        ("https://otel.example/v1/traces", "https://otel.example/v1/traces"),
        ("https://otel.example/base", "https://otel.example/base/v1/traces"),
        ("https://otel.example/base/v1/traces/", "https://otel.example/base/v1/traces/"),
        ("https://otel.example/base?key=1", "https://otel.example/base/v1/traces?key=1"),
        ("http://[::1]:4318", "http://[::1]:4318/v1/traces"),
        ("http://otel.example:4317/v1/traces", "http://otel.example:4317/v1/traces"),
    ],
)
def test_an_address_for_http_ends_in_the_path_of_traces(address: str, url: str) -> None:
    collector = collector_of({ENDPOINT: address})
    assert collector == Collector(url)


@pytest.mark.parametrize("environment", [{}, {ENDPOINT: ""}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318"}])
def test_without_an_address_there_is_no_collector(environment: dict[str, str]) -> None:
    assert collector_of(environment) is None


@pytest.mark.parametrize(
    ("variables", "protocol"),
    [
        ({ENDPOINT: "http://otel:4317"}, "grpc"),
        ({ENDPOINT: "http://otel:9", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "grpc"),
        ({ENDPOINT: "http://otel:9", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, "grpc"),
        ({ENDPOINT: "http://otel:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http/protobuf"),
        (
            {
                ENDPOINT: "http://otel:9",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            },
            "http/protobuf",
        ),
    ],
)
def test_the_protocol_is_said_by_its_variable_else_by_the_port(
    variables: dict[str, str], protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    collector = collector_of(variables)
    assert collector is not None
    assert collector.protocol == protocol


def test_grpc_without_its_package_is_an_error_that_names_the_address_for_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        MissingExtraError, match=r"HTTP needs no package .* http://otel:4318; gRPC.*agl-framework\[otlp-grpc\]"
    ):
        collector_of({ENDPOINT: "http://otel:4317"})


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({ENDPOINT: "otel:4318"}, r"must be http://host:4318.*got 'otel:4318'"),
        ({ENDPOINT: "ftp://otel"}, "must be http://host:4318"),
        ({ENDPOINT: "http://"}, "must be http://host:4318"),
        ({ENDPOINT: "http://otel:70000"}, "is not a valid address: Port out of range"),
        ({ENDPOINT: "http://me:secret@otel"}, "must not contain a user or a password"),
        ({ENDPOINT: "http://otel:9/base", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "which has no path; got '/base'"),
        (
            {ENDPOINT: "http://otel", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
            "OTEL_EXPORTER_OTLP_PROTOCOL must be grpc or http/protobuf .* got 'http/json'",
        ),
        ({ENDPOINT: "http://otel", "OTEL_EXPORTER_OTLP_HEADERS": "a=1,secret"}, "entry 2 is not key=value"),
        ({ENDPOINT: "http://otel", "OTEL_EXPORTER_OTLP_HEADERS": "a=secret%0d%0ab: 2"}, "entry 1 is not key=value"),
    ],
)
def test_what_cannot_be_followed_is_named_and_no_secret_is_shown(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        collector_of(variables)
    assert "secret" not in str(caught.value).replace("it may be secret", "")


def test_headers_do_not_show_in_the_text_of_a_collector() -> None:
    collector = collector_of({ENDPOINT: "https://otel/a?key=secret", "OTEL_EXPORTER_OTLP_HEADERS": "api-key=secret"})
    assert collector is not None
    assert collector.headers == {"api-key": "secret"}
    assert "secret" not in repr(collector.headers.keys()) + collector.shown


# --- gRPC --------------------------------------------------------------------------------------------------------


class GrpcCollector:
    """A real gRPC server; answers `codes` in order, then takes everything."""

    def __init__(self, grpc: Any, *failures: tuple[Any, bytes | None]) -> None:
        self.taken: list[ExportTraceServiceRequest] = []
        self.metadata: list[dict[str, str]] = []
        failing = list(failures)

        def export(body: bytes, context: Any) -> bytes:
            self.metadata.append(dict(context.invocation_metadata()))
            if failing:
                code, details = failing.pop(0)
                if details is not None:
                    context.set_trailing_metadata((("grpc-status-details-bin", details),))
                context.abort(code, "not today")
            self.taken.append(ExportTraceServiceRequest.FromString(body))
            return ExportTraceServiceResponse().SerializeToString()

        handler = grpc.method_handlers_generic_handler(
            "opentelemetry.proto.collector.trace.v1.TraceService",
            {"Export": grpc.unary_unary_rpc_method_handler(export)},
        )
        self.server = grpc.server(ThreadPoolExecutor(2))
        self.server.add_generic_rpc_handlers((handler,))
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()


def retry_details(seconds: int) -> bytes:
    status = Status(code=8)
    status.details.add().Pack(RetryInfo(retry_delay=Duration(seconds=seconds)))
    return status.SerializeToString()


def test_over_grpc_spans_arrive_after_the_failures_that_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    grpc = pytest.importorskip("grpc", reason="gRPC needs the extra otlp-grpc")
    monkeypatch.setattr("agentlightning.tracer.mirror._FIRST_PAUSE", 0.01)
    codes = grpc.StatusCode
    collector = GrpcCollector(grpc, (codes.UNAVAILABLE, None), (codes.RESOURCE_EXHAUSTED, retry_details(0)))
    mirror = Mirror(sender_to(Collector(collector.address, "grpc", headers={"api-key": "k"})), "grpc")
    try:
        mirror.offer(some_spans(3))
        while not collector.taken:
            collector.server.wait_for_termination(0.01)
        mirror.close(20)
    finally:
        collector.server.stop(None)
    assert (mirror.counts.sent, mirror.counts.lost) == (3, 0)
    assert len(collector.metadata) == 3
    assert collector.metadata[0]["api-key"] == "k"


def test_over_grpc_a_refusal_is_final(caplog: pytest.LogCaptureFixture) -> None:
    grpc = pytest.importorskip("grpc", reason="gRPC needs the extra otlp-grpc")
    collector = GrpcCollector(grpc, (grpc.StatusCode.UNAUTHENTICATED, None))
    mirror = Mirror(sender_to(Collector(collector.address, "grpc")), "grpc")
    try:
        mirror.offer(some_spans(2))
        mirror.close(20)
    finally:
        collector.server.stop(None)
    assert mirror.counts.lost == 2
    assert "gRPC UNAUTHENTICATED: not today" in caplog.text
