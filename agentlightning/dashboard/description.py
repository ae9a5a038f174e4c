"""What the description of the interface says of the page's data: paths and values of OpenAPI."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from agentlightning.dashboard import values
from agentlightning.dashboard.questions import MOST_PAIRS, QUESTIONS, Question
from agentlightning.store.http.openapi import json_content, parameter, responses
from agentlightning.store.http.operations import PREFIX


def described() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what OpenAPI says of the data: paths, and the values that they name."""
    _, shared = models_json_schema(
        [(getattr(values, each.answer), "serialization") for each in QUESTIONS],
        ref_template="#/components/schemas/{model}",
    )
    return {PREFIX + each.path: {"get": _entry(each)} for each in QUESTIONS}, shared.get("$defs", {})


def _entry(question: Question) -> dict[str, Any]:
    named = [part[1:-1] for part in question.path.split("/") if part.startswith("{")]
    parameters = [parameter(name, "path", {"type": "string"}, True) for name in named]
    for name in question.query:
        schema: dict[str, Any] = {"type": "string"}
        if name in ("limit", "offset"):
            schema = {"type": "integer", "minimum": 0, "maximum": MOST_PAIRS if name == "limit" else 1 << 31}
        parameters.append(parameter(name, "query", schema, name in ("before", "after")))
    answer = {"$ref": f"#/components/schemas/{question.answer}"}
    return {
        "operationId": question.name,
        "summary": question.summary,
        "parameters": parameters,
        "responses": responses(200, "Done", json_content(answer)),
    }
