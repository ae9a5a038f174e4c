"""The collector that gets a copy of the spans: `AGENT_LIGHTNING_OTLP_ENDPOINT` and the variables of OpenTelemetry.

    http://host:4318              OTLP over HTTP, to http://host:4318/v1/traces
    https://host/base             OTLP over HTTP, to https://host/base/v1/traces
    https://host/base/v1/traces   OTLP over HTTP, as written
    http://host:4317              OTLP over gRPC; https for TLS

`OTEL_EXPORTER_OTLP_PROTOCOL` (`grpc` or `http/protobuf`) has priority over the port. `OTEL_EXPORTER_OTLP_HEADERS`
(`api-key=secret,tenant=a`) are also sent. The variables for traces, `OTEL_EXPORTER_OTLP_TRACES_...`, have priority.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from agentlightning.errors import MissingExtraError

ENDPOINT = "AGENT_LIGHTNING_OTLP_ENDPOINT"
TRACES_PATH = "/v1/traces"
GRPC_PORT = 4317
Protocol = Literal["grpc", "http/protobuf"]


@dataclass(frozen=True)
class Collector:
    """An address that accepts spans."""

    url: str
    """Complete URL with its path for HTTP; `host:port` for gRPC."""
    protocol: Protocol = "http/protobuf"
    secure: bool = False
    """True for TLS with gRPC; for HTTP the scheme of the URL is used."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Headers of every request; may contain secrets."""

    @property
    def shown(self) -> str:
        """The address without its query, which may be secret."""
        return self.url.partition("?")[0]


def collector_of(environment: Mapping[str, str] = os.environ) -> Collector | None:
    """Return the collector that is configured in the environment; None if there is none.

    Raises:
        ValueError: the address is invalid or contains credentials, or the protocol or the headers are invalid.
        MissingExtraError: the address is one for gRPC, which is not installed.
    """
    endpoint = environment.get(ENDPOINT, "").strip()
    if not endpoint:
        return None
    address = _address(endpoint)
    name, protocol_name = _setting(environment, "PROTOCOL")
    if protocol_name not in ("", "grpc", "http/protobuf"):
        raise ValueError(f"{name} must be grpc or http/protobuf for {ENDPOINT}; got {protocol_name!r}")
    over_http = address.port != GRPC_PORT or address.path.rstrip("/").endswith(TRACES_PATH)
    protocol: Protocol = protocol_name or ("http/protobuf" if over_http else "grpc")
    headers = _headers(environment)
    if protocol == "http/protobuf":
        path = address.path.rstrip("/")
        whole = address.path if path.endswith(TRACES_PATH) else path + TRACES_PATH
        return Collector(urlunsplit(address._replace(path=whole, fragment="")), protocol, False, headers)
    if address.path.strip("/"):
        raise ValueError(
            f"{ENDPOINT} is for gRPC, which has no path; got {address.path!r}. Use "
            f"{address.scheme}://{address.netloc} or, for HTTP, {address.scheme}://{address.hostname}:4318{TRACES_PATH}"
        )
    if importlib.util.find_spec("grpc") is None:
        raise MissingExtraError(
            f"{ENDPOINT}={address.scheme}://{address.netloc} selects gRPC (port {GRPC_PORT}, or the variable "
            "OTEL_EXPORTER_OTLP_PROTOCOL). HTTP needs no package and usually has the address "
            f"{address.scheme}://{address.hostname}:4318; gRPC",
            "otlp-grpc",
            "grpcio",
        )
    port = address.port or GRPC_PORT
    host = f"[{address.hostname}]" if ":" in (address.hostname or "") else address.hostname
    return Collector(f"{host}:{port}", "grpc", address.scheme == "https", headers)


def _address(text: str) -> SplitResult:
    try:
        address = urlsplit(text)
        port = address.port
    except ValueError as error:
        raise ValueError(f"{ENDPOINT} is not a valid address: {error}") from error
    if address.username or address.password:
        raise ValueError(f"{ENDPOINT} must not contain a user or a password; set them in OTEL_EXPORTER_OTLP_HEADERS")
    if address.scheme not in ("http", "https") or not address.hostname or port == 0:
        raise ValueError(
            f"{ENDPOINT} must be http://host:4318, https://host/base, or for gRPC http://host:{GRPC_PORT}; got {text!r}"
        )
    return address


def _headers(environment: Mapping[str, str]) -> dict[str, str]:
    name, text = _setting(environment, "HEADERS")
    headers: dict[str, str] = {}
    for number, pair in enumerate(part for part in text.split(",") if part.strip()):
        key, equals, value = pair.partition("=")
        header, content = unquote(key.strip()), unquote(value.strip())
        plain = header.isascii() and content.isascii() and header.isprintable() and content.isprintable()
        if not equals or not header or not plain or " " in header or ":" in header:
            raise ValueError(f"{name}: entry {number + 1} is not key=value (not shown, because it may be secret)")
        headers[header.lower()] = content
    return headers


def _setting(environment: Mapping[str, str], what: str) -> tuple[str, str]:
    """Return the variable of an OpenTelemetry setting and its text; the variable for traces has priority."""
    names = (f"OTEL_EXPORTER_OTLP_TRACES_{what}", f"OTEL_EXPORTER_OTLP_{what}")
    name = next((name for name in names if environment.get(name, "").strip()), names[1])
    return name, environment.get(name, "").strip()
