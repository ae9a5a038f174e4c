"""The paths of the dashboard's data, implemented in `data.py`, and their OpenAPI description.

This module imports nothing slow, because it is read when a server is created.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

MOST_PAIRS: Final = 1000
"""Maximum number of tasks on a page of a comparison."""


class Question(NamedTuple):
    """One path of the dashboard's data."""

    path: str
    name: str
    """Name of the operation in the description. The method of `Data` has a leading underscore."""
    summary: str
    answer: str
    """Name of the class in `values.py`."""
    query: tuple[str, ...] = ()
    """Names of the query parameters."""


QUESTIONS: Final = (
    Question(
        "/rollouts/{rollout_id}/explanation",
        "explain_rollout",
        "Return for each model call of a rollout its training row, or the reason why it has none",
        "RolloutExplanation",
        ("attempt_id",),
    ),
    Question(
        "/rollouts/{rollout_id}/attempts/{attempt_id}/tree",
        "span_tree",
        "Return the spans of an attempt as a tree, with the gateway's calls below the spans of the agent",
        "SpanTree",
    ),
    Question(
        "/rollouts/{rollout_id}/attempts/{attempt_id}/conversation",
        "conversation",
        "Return the conversation of an attempt by call; `latest` is the last attempt",
        "AttemptConversation",
        ("limit",),
    ),
    Question(
        "/comparison",
        "compare_sides",
        "Compare two runs, steps of runs or versions of resources on the same tasks, with the paired test",
        "Comparison",
        ("before", "after", "limit", "offset"),
    ),
    Question("/server", "server", "Return facts about the server", "ServerFacts"),
)


def described() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the OpenAPI description of the data: paths, and the schemas that they refer to."""
    from pydantic.json_schema import models_json_schema

    from agentlightning.dashboard import values
    from agentlightning.store.http.operations import PREFIX

    _, schemas = models_json_schema(
        [(getattr(values, each.answer), "serialization") for each in QUESTIONS],
        ref_template="#/components/schemas/{model}",
    )
    return {PREFIX + each.path: {"get": _entry(each)} for each in QUESTIONS}, schemas.get("$defs", {})


def _entry(question: Question) -> dict[str, Any]:
    from agentlightning.store.http.openapi import json_content, parameter, responses

    names = [part[1:-1] for part in question.path.split("/") if part.startswith("{")]
    parameters = [parameter(name, "path", {"type": "string"}, True) for name in names]
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
