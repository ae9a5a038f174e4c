"""What lists leave out: API keys of resources, and values of spans and runs under names that look secret.

Whoever needs the key of a model asks for its resources by id or for the latest; lists are what pages are made of. An
algorithm goes on from a `state` record and hands out what a `prompt` record says, so these are told as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from agentlightning.types import (
    LLM,
    CustomResource,
    Event,
    Link,
    PaginatedResult,
    ResourcesUpdate,
    Run,
    RunRecord,
    Span,
)
from agentlightning.utils.secret_names import without_secrets


def hide_secrets(operation: str, answer: object) -> Any:
    """Return the answer of an operation as it may leave the server; the same object if there is nothing to hide."""
    if isinstance(answer, Run):
        return _run(answer)
    hide = _HIDDEN_IN.get(operation)
    if hide is None or not isinstance(answer, PaginatedResult):
        return answer
    page = cast("PaginatedResult[Any]", answer)
    return page.model_copy(update={"items": [hide(item) for item in page.items]})


def _resources(update: ResourcesUpdate) -> ResourcesUpdate:
    resources: dict[str, object] = {}
    for name, resource in update.resources.items():
        if isinstance(resource, LLM):
            sampling = without_secrets(resource.sampling_parameters) or resource.sampling_parameters
            resource = resource.model_copy(update={"api_key": None, "sampling_parameters": sampling})
        elif isinstance(resource, CustomResource):
            resource = resource.model_copy(update={"values": without_secrets(resource.values) or resource.values})
        resources[name] = resource
    return update.model_copy(update={"resources": resources})


def _span(span: Span) -> Span:
    changes: dict[str, Any] = {}
    for name in ("attributes", "scope", "__pydantic_extra__"):
        values: Mapping[str, object] | None = getattr(span, name)
        if values and (hidden := without_secrets(values)) is not None:
            changes[name] = hidden
    parts: tuple[tuple[str, Sequence[Event | Link]], ...] = (("events", span.events), ("links", span.links))
    for name, those in parts:
        found = [without_secrets(part.attributes) if part.attributes else None for part in those]
        if any(attributes is not None for attributes in found):
            changes[name] = [
                part if attributes is None else part.model_copy(update={"attributes": attributes})
                for part, attributes in zip(those, found, strict=True)
            ]
    if (attributes := without_secrets(span.resource.attributes)) is not None:
        changes["resource"] = span.resource.model_copy(update={"attributes": attributes})
    extra = changes.pop("__pydantic_extra__", {})
    return span.model_copy(update={**changes, **extra}) if changes or extra else span


def _run(run: Run) -> Run:
    parts = (("config", run.config), ("metadata", run.metadata))
    changes = {name: hidden for name, part in parts if part and (hidden := without_secrets(part)) is not None}
    return run.model_copy(update=changes) if changes else run


def _run_record(record: RunRecord) -> RunRecord:
    hidden = None if record.kind in _TOLD_WHOLE else without_secrets(record.data)
    return record if hidden is None else record.model_copy(update={"data": hidden})


_TOLD_WHOLE = frozenset(("state", "prompt"))
_HIDDEN_IN: dict[str, Callable[[Any], Any]] = {
    "query_resources": _resources,
    "query_spans": _span,
    "query_runs": _run,
    "query_run_records": _run_record,
}
