"""Parts of the OpenAPI document that no operation yields: errors, headers, the token, and paths beside the table."""

from __future__ import annotations

from typing import Any

from agentlightning.store.http.event_stream import EVENTS_PATH
from agentlightning.store.http.metrics import PROMETHEUS_PATH
from agentlightning.store.http.operations import PREFIX
from agentlightning.store.http.otlp import LOGS_PATH, METRICS_PATH, TRACES_PATH

HEALTH_PATHS = ("/health", f"{PREFIX}/health")
"""What answers without a token."""
OPENAPI_PATH = "/openapi.json"
Schema = dict[str, Any]
"""An object of the document, as JSON data."""

_ERRORS = {
    "400": "A value is wrong, or the request is no valid HTTP",
    "401": "The token is missing or wrong",
    "403": "The Host header names another server, or a page of another origin asks",
    "404": "The id that is acted on is unknown",
    "408": "The request took too long to arrive",
    "409": "The present state forbids the change",
    "410": "What is asked for existed and was dropped",
    "413": "The body is larger than 32 MiB, or a part of it is beyond its bound",
    "414": "The URL is too long",
    "415": "The body is compressed, or of a type that is not taken here",
    "422": "The request has the wrong shape, and `detail` lists where; or its token came with another request before",
    "429": "Too much is under way; ask again after `Retry-After` seconds",
    "431": "The request's head is too large",
    "500": "The server failed; its log says why",
    "501": "This store has no such operation",
    "503": "The server is full or stopping; ask again after `Retry-After` seconds",
    "507": "The store could not write; nothing of the request was stored",
}
_LATER = frozenset(("429", "503"))

VERSION_HEADER = {"x-agl-version": {"$ref": "#/components/headers/x-agl-version"}}
IDEMPOTENCY_KEY = {"$ref": "#/components/parameters/idempotency-key"}


def responses(status: int, description: str, content: Schema) -> Schema:
    """Return the answers of one operation: the good one and every error."""
    good = {"description": description, "headers": VERSION_HEADER, "content": content}
    return {str(status): good, **{code: {"$ref": f"#/components/responses/{code}"} for code in _ERRORS}}


def json_content(schema: Schema) -> Schema:
    """Return the content of a JSON body."""
    return {"application/json": {"schema": schema}}


def parameter(name: str, where: str, schema: object, required: bool) -> Schema:
    """Return one parameter."""
    return {"name": name, "in": where, "required": required, "schema": schema}


def components(schemas: Schema) -> Schema:
    """Return the shared parts, with the schemas of the models."""
    error = {
        "type": "object",
        "properties": {
            "detail": {
                "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}],
                "description": "What was wrong and what was expected; for a request of the wrong shape a list",
            },
            "error_type": {"type": "string", "description": "Class that a client raises, or the kind of refusal"},
        },
        "required": ["detail", "error_type"],
    }
    later = {"retry-after": {"$ref": "#/components/headers/retry-after"}}
    return {
        "schemas": {**schemas, "Error": error},
        "headers": {
            "x-agl-version": {"description": "Version of the server", "schema": {"type": "string"}},
            "retry-after": {"description": "Seconds", "schema": {"type": "integer", "minimum": 1}},
        },
        "parameters": {
            "idempotency-key": {
                **parameter("Idempotency-Key", "header", {"type": "string", "maxLength": 512}, False),
                "description": "A request that is repeated with the same key is answered again, not done again",
            }
        },
        "responses": {
            code: {
                "description": description,
                "headers": {**VERSION_HEADER, **(later if code in _LATER else {})},
                "content": json_content({"$ref": "#/components/schemas/Error"}),
            }
            for code, description in _ERRORS.items()
        },
        "securitySchemes": {
            "token": {"type": "http", "scheme": "bearer", "description": "AGL_TOKEN of the server, if it has one"}
        },
    }


def other_paths() -> Schema:
    """Return the paths that are no operations."""
    found: Schema = {EVENTS_PATH: {"get": _EVENTS}}
    protobuf = {"application/x-protobuf": {"schema": {"type": "string", "format": "binary"}}}
    content = {**protobuf, **json_content({"type": "object"})}
    # of an error in OTLP's own form, `google.rpc.Status`
    form = {**protobuf, **json_content({"type": "object", "properties": {"message": {"type": "string"}}})}
    errors = {
        code: {"description": _ERRORS[code], "content": form, "headers": VERSION_HEADER}
        for code in ("400", "413", "415", "429", "503")
    }
    for path, signal in ((TRACES_PATH, "traces"), (METRICS_PATH, "metrics"), (LOGS_PATH, "logs")):
        stored = "spans become spans of their attempts" if signal == "traces" else "accepted and not stored"
        found[path] = {
            "post": {
                "operationId": f"otlp_{signal}",
                "summary": f"OTLP/HTTP {signal}: {stored}",
                "requestBody": {"content": content},
                "responses": {**responses(200, "Done, perhaps in part: see partial_success", content), **errors},
            }
        }
    for number, path in enumerate((PROMETHEUS_PATH, PROMETHEUS_PATH + "/")):
        found[path] = {"get": _page("prometheus", number, "Metrics as Prometheus reads them", "text/plain")}
    for number, path in enumerate(HEALTH_PATHS):
        entry = _page("health", number, "The server answers; needs no token", "application/json", _HEALTH)
        found[path] = {"get": {**entry, "security": []}}
    described = {"type": "object"}
    found[OPENAPI_PATH] = {"get": _page("openapi", 0, "This document", "application/json", described)}
    return found


_TEXT = {"type": "string"}
_EVENTS: Schema = {
    "operationId": "events",
    "summary": "Follow changes of rollouts and runs as server-sent events",
    "description": (
        "Messages: `cursor` (where the stream begins), `rollout` and `run` (how a changed one stands), `error` (the "
        "last). "
        "Their ids are cursors: come back with the last one as `Last-Event-ID` or `after` and nothing is missed."
    ),
    "parameters": [
        parameter("after", "query", _TEXT, False),
        parameter("run_id", "query", _TEXT, False),
        parameter("Last-Event-ID", "header", _TEXT, False),
    ],
    "responses": responses(200, "A stream that ends when either side leaves", {"text/event-stream": {"schema": _TEXT}}),
}
"""The stream of events."""
_HEALTH = {
    "type": "object",
    "properties": {"status": {"const": "ok"}, "version": {"type": "string"}},
    "required": ["status", "version"],
}


def _page(operation: str, number: int, summary: str, media: str, schema: Schema | None = None) -> Schema:
    return {
        "operationId": operation + (f"_{number + 1}" if number else ""),
        "summary": summary,
        "responses": responses(200, "Done", {media: {"schema": schema or {"type": "string"}}}),
    }
