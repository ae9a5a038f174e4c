"""The OpenAPI 3.1 document of the store's HTTP interface, made from the operation table."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

from agentlightning.store.base import LightningStore
from agentlightning.store.routes import OPERATIONS, PREFIX, Operation
from agentlightning.utils.version import VERSION

_REFERENCE = "#/components/schemas/{model}"
_ERRORS = {
    "400": "A value is wrong",
    "401": "The token is missing or wrong",
    "404": "The id that is acted on is unknown",
    "409": "The present state forbids the change",
    "422": "The request has the wrong shape",
}


@lru_cache(maxsize=1)
def openapi_document() -> dict[str, Any]:
    """Return the document as JSON data."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for operation in OPERATIONS.values():
        ways = ((operation.row.method, operation.row.path), *operation.row.also)
        for number, (method, path) in enumerate(ways):
            entry = _entry(operation, method, schemas, suffix="" if number == 0 else f"_{number + 1}")
            paths.setdefault(PREFIX + path, {})[method.lower()] = entry
    return {
        "openapi": "3.1.0",
        "info": {"title": "LightningStore Server", "version": VERSION},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _entry(operation: Operation, method: str, schemas: dict[str, Any], suffix: str) -> dict[str, Any]:
    summary = (inspect.getdoc(getattr(LightningStore, operation.name)) or "").split("\n")[0]
    answer = _schema(operation.answer, schemas, "serialization")
    if operation.row.wrap:
        answer = {"type": "object", "properties": {operation.row.wrap: answer}, "required": [operation.row.wrap]}
    content = {"application/json": {"schema": answer}}
    entry: dict[str, Any] = {
        "operationId": operation.name + suffix,
        "summary": summary,
        "parameters": [_parameter(name, "path", {"type": "string"}, True) for name in operation.in_path],
        "responses": {str(operation.row.status): {"description": "Done", "content": content}},
    }
    for status, description in _ERRORS.items():
        entry["responses"][status] = {"description": description}
    if method == "GET":
        arguments = _schema(operation.query_type, schemas, "validation")
        for name, schema in arguments.get("properties", {}).items():
            entry["parameters"].append(_parameter(name, "query", schema, name in arguments.get("required", ())))
    else:
        body = {"application/json": {"schema": _schema(operation.body_type, schemas, "validation")}}
        entry["requestBody"] = {"content": body, "required": bool(operation.row.body)}
    return entry


def _parameter(name: str, where: str, schema: Any, required: bool) -> dict[str, Any]:
    return {"name": name, "in": where, "required": required, "schema": schema}


def _schema(adapter: Any, schemas: dict[str, Any], mode: Any) -> dict[str, Any]:
    schema = adapter.json_schema(ref_template=_REFERENCE, mode=mode)
    schemas.update(schema.pop("$defs", {}))
    if "properties" in schema and "title" in schema and schema["title"].endswith("_arguments"):
        schema.pop("title")
    return schema


__all__ = ["openapi_document"]

if __name__ == "__main__":
    import json

    print(json.dumps(openapi_document(), indent=2))
