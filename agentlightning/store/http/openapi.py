"""The OpenAPI 3.1 document of the store's HTTP interface, made from the operation table."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any, Literal, cast

from pydantic import TypeAdapter

from agentlightning.field_help import field_docstrings
from agentlightning.store.base import LightningStore, LightningStoreStatistics
from agentlightning.store.http.mounts import mounts_of
from agentlightning.store.http.openapi_parts import (
    IDEMPOTENCY_KEY,
    Schema,
    components,
    json_content,
    other_paths,
    parameter,
    responses,
)
from agentlightning.store.http.operations import OPERATIONS, PREFIX, WireOperation
from agentlightning.types import RolloutFilter
from agentlightning.utils.version import VERSION

_REFERENCE = "#/components/schemas/{model}"
_Part = Literal["body", "query", "answer"]
_Schemas = dict[tuple[str, _Part], Schema]
_PAGING: dict[str, Schema] = {
    "limit": {"type": "integer", "minimum": -1, "not": {"const": 0}, "default": -1, "description": "-1 is all"},
    "offset": {"type": "integer", "minimum": 0, "default": 0},
}


@lru_cache(maxsize=1)
def openapi_document() -> Schema:
    """Return the document as JSON data, with what the mounted parts say of their paths."""
    parts: list[tuple[tuple[str, _Part], Literal["validation", "serialization"], TypeAdapter[Any]]] = []
    for name, operation in OPERATIONS.items():
        parts.append(((name, "body"), "validation", operation.body_type))
        parts.append(((name, "query"), "validation", operation.query_type))
        parts.append(((name, "answer"), "serialization", operation.answer))
    # the schema of each part, and the models they refer to; one that is read and written otherwise has two
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
    """Return schemas in which the form that is written of a model has the plain name, whether or not there is one that
    is read."""
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
    raise RuntimeError("a description has no store")


def _schema(operation: str, schema: Schema, models: Schema) -> Schema:
    """Return the schema of one part of an operation, with what is checked beside the types: pages, and fields that are
    never null. Arguments stand in place of the reference to them: they have one user and no name of their own."""
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    found = models[name] if name.endswith("_arguments") else schema
    schema = {key: value for key, value in found.items() if key != "title"}
    fields: Schema = dict(schema.get("properties", {}))
    if OPERATIONS[operation].is_page:
        fields.update({name: paging for name, paging in _PAGING.items() if name in fields})
    for name in OPERATIONS[operation].declared.never_null:
        if name in fields:
            left = [choice for choice in fields[name].get("anyOf", []) if choice != {"type": "null"}]
            fields[name] = left[0] if len(left) == 1 else {**fields[name], "anyOf": left}
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


__all__ = ["openapi_document"]

if __name__ == "__main__":
    import json

    print(json.dumps(openapi_document(), indent=2))
