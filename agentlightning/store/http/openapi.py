"""The OpenAPI 3.1 document of the store's HTTP interface, made from the operation table."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any, Literal, cast

from pydantic import TypeAdapter

from agentlightning.base.field_help import field_docstrings
from agentlightning.store.base import LightningStore, LightningStoreStatistics
from agentlightning.store.http.event_stream import EVENTS_PATH
from agentlightning.store.http.metrics import PROMETHEUS_PATH
from agentlightning.store.http.mounts import mounts_of
from agentlightning.store.http.operations import OPERATIONS, PREFIX, WireOperation
from agentlightning.store.http.otlp import LOGS_PATH, METRICS_PATH, TRACES_PATH
from agentlightning.types import RolloutFilter
from agentlightning.utils.version import VERSION

HEALTH_PATHS = ("/health", f"{PREFIX}/health")
"""Paths that need no token."""
OPENAPI_PATH = "/openapi.json"
Schema = dict[str, Any]
"""An object of the document, as JSON data."""

_ERRORS = {
    "400": "A value is wrong, or the request is not valid HTTP",
    "401": "The token is missing or wrong",
    "403": "The Host header is not allowed, or the request comes from a page of another origin",
    "404": "The id does not exist",
    "408": "The request took too long to arrive",
    "409": "The current state forbids the change",
    "410": "The object existed and was removed",
    "413": "The body is larger than 32 MiB, or a part of it is too large",
    "414": "The URL is too long",
    "415": "The body is compressed or has an unsupported media type",
    "422": "The request has the wrong shape (`detail` lists the errors), or its token was used for another request",
    "429": "Too many requests are in progress; retry after `Retry-After` seconds",
    "431": "The headers of the request are too large",
    "500": "The server failed; its log has the cause",
    "501": "This store does not support the operation",
    "503": "The server is full or stopping; retry after `Retry-After` seconds",
    "507": "The store could not write; nothing of the request was stored",
}
_LATER = frozenset(("429", "503"))

VERSION_HEADER = {"x-agl-version": {"$ref": "#/components/headers/x-agl-version"}}
IDEMPOTENCY_KEY = {"$ref": "#/components/parameters/idempotency-key"}
_REFERENCE = "#/components/schemas/{model}"
_Part = Literal["body", "query", "answer"]
_Schemas = dict[tuple[str, _Part], Schema]
_PAGING: dict[str, Schema] = {
    "limit": {"type": "integer", "minimum": -1, "not": {"const": 0}, "default": -1, "description": "-1 for all"},
    "offset": {"type": "integer", "minimum": 0, "default": 0},
}


@lru_cache(maxsize=1)
def openapi_document() -> Schema:
    """Return the document as JSON data, including the paths of the mounted parts."""
    parts: list[tuple[tuple[str, _Part], Literal["validation", "serialization"], TypeAdapter[Any]]] = []
    for name, operation in OPERATIONS.items():
        parts.append(((name, "body"), "validation", operation.body_type))
        parts.append(((name, "query"), "validation", operation.query_type))
        parts.append(((name, "answer"), "serialization", operation.answer))
    # the schema of each part, and the models they refer to; a model with a different output form has two schemas
    made, shared = _without_output(TypeAdapter.json_schemas(parts, ref_template=_REFERENCE))
    models: Schema = shared.get("$defs", {})
    for name, text in field_docstrings(LightningStoreStatistics).items():
        # pydantic reads no docstrings of a TypedDict
        models["LightningStoreStatistics"]["properties"][name]["description"] = text
    schemas = {key: _schema(key[0], schema, models) for (key, _), schema in made.items()}
    paths: Schema = {}
    for operation in OPERATIONS.values():
        for number, (method, path) in enumerate(operation.declared.ways):
            entry = _entry(operation, method, path, schemas, suffix="" if number == 0 else f"_{number + 1}")
            paths.setdefault(PREFIX + path, {})[method.lower()] = entry
    for mount in mounts_of(_no_store):
        added, described = mount.describe()
        paths.update(added)
        models.update(described)
    return {
        "openapi": "3.1.0",
        "info": {"title": "LightningStore Server", "version": VERSION},
        "security": [{"token": []}],
        "paths": {**paths, **other_paths()},
        "components": components({key: value for key, value in models.items() if not key.endswith("_arguments")}),
    }


def _without_output(made: Any) -> Any:
    """Return schemas in which the output form of a model has the plain name, even if it has a separate input form."""
    if isinstance(made, dict):
        named = cast("dict[Any, Any]", made)
        return {_plain_name(key): _without_output(value) for key, value in named.items()}
    if isinstance(made, tuple) and not all(isinstance(part, str) for part in cast("tuple[Any, ...]", made)):
        return tuple(_without_output(part) for part in cast("tuple[Any, ...]", made))
    if isinstance(made, list):
        return [_without_output(part) for part in cast("list[Any]", made)]
    return _plain_name(made)


def _plain_name(value: Any) -> Any:
    return value.removesuffix("-Output") if isinstance(value, str) else value


def _no_store() -> LightningStore:
    raise RuntimeError("the OpenAPI document has no store")


def _schema(operation: str, schema: Schema, models: Schema) -> Schema:
    """Return the schema of one part of an operation, including the limits of pages and the fields that are never null.
    The schema of the arguments is inlined, because it is used once and has no public name."""
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    source = models[name] if name.endswith("_arguments") else schema
    schema = {key: value for key, value in source.items() if key != "title"}
    fields: Schema = dict(schema.get("properties", {}))
    if OPERATIONS[operation].is_page:
        fields.update({name: paging for name, paging in _PAGING.items() if name in fields})
    for name in OPERATIONS[operation].declared.never_null:
        if name in fields:
            choices = [choice for choice in fields[name].get("anyOf", []) if choice != {"type": "null"}]
            fields[name] = choices[0] if len(choices) == 1 else {**fields[name], "anyOf": choices}
    return {**schema, "properties": fields} if fields else schema


def _entry(operation: WireOperation, method: str, path: str, schemas: _Schemas, suffix: str) -> Schema:
    answer = schemas[operation.name, "answer"]
    if operation.declared.wrap:
        answer = {
            "type": "object",
            "properties": {operation.declared.wrap: answer},
            "required": [operation.declared.wrap],
        }
    entry: Schema = {
        "operationId": operation.name + suffix,
        "summary": (inspect.getdoc(getattr(LightningStore, operation.name)) or "").split("\n")[0],
        "parameters": [parameter(name, "path", {"type": "string"}, True) for name in operation.in_path],
        "responses": responses(operation.declared.status, "Done", json_content(answer)),
    }
    if operation.declared.retry == "token":
        entry["parameters"].append(IDEMPOTENCY_KEY)
    query = schemas[operation.name, "query"]
    required: list[str] = query.get("required", [])
    for name in operation.in_body if method == "GET" else operation.in_query:
        if name == "filter":
            fields = RolloutFilter.model_json_schema()["properties"]
            entry["parameters"] += [parameter(field, "query", schema, False) for field, schema in fields.items()]
        else:
            entry["parameters"].append(parameter(name, "query", query["properties"][name], name in required))
    if method != "GET":
        body = schemas[operation.name, "body"]
        entry["requestBody"] = {
            "content": json_content(body),
            "required": bool(operation.declared.body) or bool(body.get("required")),
        }
    return entry


# --- parts without an operation: errors, headers, the token, and other paths ------------------------------------------


def responses(status: int, description: str, content: Schema) -> Schema:
    """Return the responses of one operation: success and all errors."""
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
                "description": "What was wrong and what was expected; a list for a request with the wrong shape",
            },
            "error_type": {"type": "string", "description": "Error class that a client raises, or the kind of error"},
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
                "description": "A request that is repeated with the same key returns the first response",
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
    """Return the paths that are not operations."""
    paths: Schema = {EVENTS_PATH: {"get": _EVENTS}}
    protobuf = {"application/x-protobuf": {"schema": {"type": "string", "format": "binary"}}}
    content = {**protobuf, **json_content({"type": "object"})}
    # of an error in OTLP's own form, `google.rpc.Status`
    form = {**protobuf, **json_content({"type": "object", "properties": {"message": {"type": "string"}}})}
    errors = {
        code: {"description": _ERRORS[code], "content": form, "headers": VERSION_HEADER}
        for code in ("400", "413", "415", "429", "503")
    }
    for path, signal in ((TRACES_PATH, "traces"), (METRICS_PATH, "metrics"), (LOGS_PATH, "logs")):
        stored = "store spans of attempts" if signal == "traces" else "accept without storing"
        paths[path] = {
            "post": {
                "operationId": f"otlp_{signal}",
                "summary": f"OTLP/HTTP {signal}: {stored}",
                "requestBody": {"content": content},
                "responses": {**responses(200, "Done; `partial_success` reports rejected parts", content), **errors},
            }
        }
    for number, path in enumerate((PROMETHEUS_PATH, PROMETHEUS_PATH + "/")):
        paths[path] = {"get": _page("prometheus", number, "Return metrics in the Prometheus format", "text/plain")}
    for number, path in enumerate(HEALTH_PATHS):
        entry = _page("health", number, "Check that the server responds; needs no token", "application/json", _HEALTH)
        paths[path] = {"get": {**entry, "security": []}}
    described = {"type": "object"}
    paths[OPENAPI_PATH] = {"get": _page("openapi", 0, "This document", "application/json", described)}
    return paths


_TEXT = {"type": "string"}
_EVENTS: Schema = {
    "operationId": "events",
    "summary": "Follow changes of rollouts and runs as server-sent events",
    "description": (
        "Messages: `cursor` (the start of the stream), `rollout` and `run` (current state after a change), `worker`, "
        "`resources`, `lag` and `error` (the last message). Message ids are cursors: to continue without gaps, "
        "reconnect with the last id as `Last-Event-ID` or `after`."
    ),
    "parameters": [
        parameter("after", "query", _TEXT, False),
        parameter("run_id", "query", _TEXT, False),
        parameter("Last-Event-ID", "header", _TEXT, False),
    ],
    "responses": responses(200, "Stream until either side disconnects", {"text/event-stream": {"schema": _TEXT}}),
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


if __name__ == "__main__":
    import json

    print(json.dumps(openapi_document(), indent=2))
