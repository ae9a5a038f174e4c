"""A collector that takes OTLP over HTTP on a port of this machine, and behaves as badly as a test wants."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from typing_extensions import override

from agentlightning.types import Span
from agentlightning.utils.otlp import Rejections, spans_of


@dataclass
class Reply:
    """One answer of a collector."""

    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    hang_up: bool = False
    """Close the connection instead of answering."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has left is no news."""


class Collector:
    """Serves between `with` and its end. `replies` are given in order, then 200; a closed `gate` holds answers back."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies)
        self.bodies: list[ExportTraceServiceRequest] = []
        """Bodies of the requests that were answered with 200."""
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.asked = threading.Condition()
        self.gate = threading.Event()
        self.gate.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                reply = collector._note(self.path, {k.lower(): v for k, v in self.headers.items()}, body)
                collector.gate.wait(30)
                if reply.hang_up:
                    self.close_connection = True
                    return
                self.send_response(reply.status)
                for name, value in (*reply.headers, ("content-length", str(len(reply.body)))):
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(reply.body)

            @override
            def log_message(self, format: str, *args: Any) -> None: ...

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def _note(self, path: str, headers: dict[str, str], body: bytes) -> Reply:
        with self.asked:
            self.paths.append(path)
            self.headers.append(headers)
            reply = (
                self.replies.pop(0) if self.replies else Reply(body=ExportTraceServiceResponse().SerializeToString())
            )
            if reply.status == 200 and not reply.hang_up:
                self.bodies.append(ExportTraceServiceRequest.FromString(gzip.decompress(body)))
            self.asked.notify_all()
        return reply

    def wait_until(self, reached: Callable[[], bool], seconds: float = 20.0) -> None:
        """Wait for a state of this collector; it is looked at after each request."""
        with self.asked:
            assert self.asked.wait_for(reached, seconds), f"{len(self.paths)} requests, {len(self.names)} spans"

    @property
    def spans(self) -> list[Span]:
        """The spans taken so far, in order."""
        return [span for body in self.bodies for span in spans_of(body, Rejections())]

    @property
    def names(self) -> list[str]:
        return [
            span.name
            for body in self.bodies
            for resource in body.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
