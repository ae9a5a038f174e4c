"""OTLP, OpenTelemetry's wire format: bytes of a request to spans and back, and the HTTP side that any signal shares.

Nothing here knows a store. The HTTP side (`http.py`) needs Starlette and is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.rpc.status_pb2 import Status

from agentlightning.utils.lazy import lazy_attributes
from agentlightning.utils.otlp.body import JSON_CT, PROTOBUF_CT, UnsupportedMediaError, form_of, parse_body, unpacked
from agentlightning.utils.otlp.decode import spans_from_proto, spans_of
from agentlightning.utils.otlp.encode import encode_spans, request_of
from agentlightning.utils.otlp.json_form import message_from_json
from agentlightning.utils.otlp.rejections import Rejections

if TYPE_CHECKING:
    from agentlightning.utils.otlp.http import handle_otlp_export

_LAZY = {"handle_otlp_export": "agentlightning.utils.otlp.http"}


def __getattr__(name: str) -> Any:
    return lazy_attributes(__name__, _LAZY, name)


__all__ = [
    "JSON_CT",
    "PROTOBUF_CT",
    "Rejections",
    "Status",
    "UnsupportedMediaError",
    "encode_spans",
    "form_of",
    "handle_otlp_export",
    "message_from_json",
    "parse_body",
    "request_of",
    "spans_from_proto",
    "spans_of",
    "unpacked",
]
