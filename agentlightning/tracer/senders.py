"""One request with an encoded export to a collector, over HTTP or gRPC, and its result. Without retries.

Runs in the thread of a `Mirror`. Both senders return the same type: accepted, to be retried, or refused permanently.
"""

from __future__ import annotations

import gzip
import http.client
import importlib
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import IO, Any, Literal, Protocol, cast
from urllib.parse import urlsplit

from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from typing_extensions import override

from agentlightning.base.terminal import cut
from agentlightning.tracer.collector import Collector
from agentlightning.utils.backoff import retry_after_seconds
from agentlightning.utils.http.auth import is_loopback
from agentlightning.utils.version import VERSION

_RETRIED_STATUSES = frozenset((429, 502, 503, 504))
_RETRIED_CODES = frozenset(("CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"))
_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_MOST_ANSWER_BYTES = 64 * 1024
_SHOWN = 200
_GZIP_LEVEL = 4
"""Compression level; takes a third of the time of the highest level, and a few percent more bytes."""


@dataclass(frozen=True)
class Answer:
    """The result of one export."""

    verdict: Literal["taken", "again", "refused"]
    why: str = ""
    rejected: int = 0
    """Number of spans that the collector rejected."""
    retry_after: float | None = None
    """Seconds to wait before a retry, as requested by the collector."""


class Sender(Protocol):
    """A connection to a collector. Used by one thread."""

    def send(self, body: bytes, timeout: float) -> Answer:
        """Send an encoded `ExportTraceServiceRequest`; raises no network errors."""
        ...

    def close(self) -> None: ...


def sender_to(collector: Collector) -> Sender:
    """Return the sender for a collector, which connects later."""
    return GrpcSender(collector) if collector.protocol == "grpc" else HttpSender(collector)


# --- HTTP --------------------------------------------------------------------------------------------------------


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    @override
    def redirect_request(self, *args: object, **kwargs: object) -> None:
        """Refuse redirects: a redirected POST would arrive as a GET without spans."""
        return None


class HttpSender:
    """OTLP over HTTP, protobuf and gzip. A collector on this machine is reached without the environment's proxy."""

    def __init__(self, collector: Collector) -> None:
        self._url = collector.url
        self._headers = {
            **collector.headers,
            "content-type": "application/x-protobuf",
            "content-encoding": "gzip",
            "user-agent": f"agentlightning/{VERSION}",
        }
        local = is_loopback(urlsplit(collector.url).hostname or "")
        proxies = urllib.request.ProxyHandler({}) if local else urllib.request.ProxyHandler()
        self._opener = urllib.request.build_opener(proxies, _NoRedirects)

    def send(self, body: bytes, timeout: float) -> Answer:
        request = urllib.request.Request(self._url, gzip.compress(body, _GZIP_LEVEL), self._headers, method="POST")
        try:
            with self._opener.open(request, timeout=timeout) as reply:
                return _taken(_read(reply))
        except urllib.error.HTTPError as error:
            with error:
                return _refused(error, _read(error))
        except (OSError, http.client.HTTPException, ValueError) as error:  # no connection, no answer, or no HTTP
            return Answer("again", f"{type(error).__name__}: {getattr(error, 'reason', error)}")

    def close(self) -> None:
        self._opener.close()


def _read(reply: IO[bytes]) -> bytes:
    try:
        return reply.read(_MOST_ANSWER_BYTES)
    except (OSError, http.client.HTTPException):  # the status has arrived, and it is enough
        return b""


def _taken(body: bytes) -> Answer:
    """Return the result of an accepted export, complete or partial; an unreadable one counts as complete."""
    try:
        partial = ExportTraceServiceResponse.FromString(body).partial_success
    except DecodeError:
        return Answer("taken")
    return Answer("taken", _short(partial.error_message), max(partial.rejected_spans, 0))


def _refused(error: urllib.error.HTTPError, body: bytes) -> Answer:
    why = f"HTTP {error.code} {error.reason}"
    if 300 <= error.code < 400:
        return Answer(
            "refused", f"{why}: redirects are not followed; set the address to {error.headers.get('location')}"
        )
    if "protobuf" in (error.headers.get("content-type") or ""):
        try:
            message = _short(Status.FromString(body).message)
        except DecodeError:
            message = ""
    else:
        message = _short(body.decode("utf-8", "replace"))
    why = f"{why}: {message}" if message else why
    if error.code in _RETRIED_STATUSES:
        return Answer("again", why, retry_after=retry_after_seconds(error.headers.get("retry-after")))
    return Answer("refused", why)


def _short(text: str) -> str:
    """Return one line without control characters for the terminal."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return cut(line, _SHOWN)


# --- gRPC --------------------------------------------------------------------------------------------------------


class GrpcSender:
    """OTLP over gRPC with gzip; proxies as for HTTP. Needs the package `grpcio`, which is loaded only here."""

    def __init__(self, collector: Collector) -> None:
        self._grpc: Any = importlib.import_module("grpc")
        self._metadata = tuple(collector.headers.items())
        options = [("grpc.enable_http_proxy", 0)] if is_loopback(collector.url.rpartition(":")[0]) else []
        if collector.secure:
            credentials = self._grpc.ssl_channel_credentials()
            self._channel: Any = self._grpc.secure_channel(collector.url, credentials, options)
        else:
            self._channel = self._grpc.insecure_channel(collector.url, options)
        self._export: Any = self._channel.unary_unary(_METHOD)  # bytes in, bytes out

    def send(self, body: bytes, timeout: float) -> Answer:
        try:
            compression = self._grpc.Compression.Gzip
            reply = self._export(body, timeout=timeout, metadata=self._metadata, compression=compression)
        except self._grpc.RpcError as error:
            code = cast(str, error.code().name)
            delay = _retry_info(error)
            why = f"gRPC {code}: {_short(error.details() or '')}"
            again = code in _RETRIED_CODES or (code == "RESOURCE_EXHAUSTED" and delay is not None)
            return Answer("again" if again else "refused", why, retry_after=delay)
        return _taken(reply)

    def close(self) -> None:
        self._channel.close()


def _retry_info(error: Any) -> float | None:
    """Return the seconds to wait that the server requests in the details of a gRPC status."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            try:
                details = Status.FromString(value).details
            except DecodeError:
                return None
            for detail in details:
                info = RetryInfo()
                if detail.Unpack(info):
                    return max(0.0, info.retry_delay.ToTimedelta().total_seconds())
    return None
