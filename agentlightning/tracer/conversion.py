"""Converts attributes of a program or an instrumentation to values that a stored span can contain. Never raises.

OpenTelemetry accepts attributes that a stored span cannot contain: None, maps, mixed lists, bytes, enumerations. None
is excluded, because readers could take it for a text; an enumeration becomes its value, the rest JSON text."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any, cast

from opentelemetry.sdk.trace import ReadableSpan

from agentlightning.types import Attributes, Span
from agentlightning.utils.attributes import sanitize_attribute_value
from agentlightning.utils.otel import flatten_attributes, sanitize_attributes

logger = logging.getLogger(__name__)

_PLAIN = frozenset((str, bool, int, float, tuple))
_COPIED = ("name", "status", "parent", "kind", "start_time", "end_time", "instrumentation_scope")
_COUNTS = ("dropped_attributes", "dropped_events", "dropped_links")
Fit = Callable[[Mapping[str, object] | None], dict[str, object]]


def span_of(ended: ReadableSpan, rollout_id: str, attempt_id: str, sequence_id: int) -> Span:
    """Return the span; if it is unreadable, only its name, times and place."""
    with contextlib.suppress(Exception):  # unsuitable values are converted below
        if _PLAIN.issuperset(map(type, (ended.attributes or {}).values())):
            return Span.from_opentelemetry(ended, rollout_id, attempt_id, sequence_id)
    try:
        return Span.from_opentelemetry(_fitted(ended, _fitting), rollout_id, attempt_id, sequence_id)
    except Exception as error:  # boundary: one unreadable span must not cost an attempt its evidence
        logger.warning("[Rollout %s] unreadable attributes of span %r are lost: %r", rollout_id, ended.name, error)
        return Span.from_opentelemetry(_fitted(ended, lambda _: {}), rollout_id, attempt_id, sequence_id)


def _fitted(ended: ReadableSpan, fit: Fit) -> Any:
    """Return a copy of the span with attributes, also those of its parts, converted by `fit`."""
    context = ended.get_span_context()
    return SimpleNamespace(
        **{name: getattr(ended, name, None) for name in _COPIED},
        **{name: getattr(ended, name, 0) for name in _COUNTS},
        get_span_context=lambda: context,
        attributes=fit(ended.attributes),
        events=[_part(event, fit, "name", "timestamp") for event in ended.events],
        links=[_part(link, fit, "context") for link in ended.links],
        resource=_part(ended.resource, fit, "schema_url"),
    )


def _part(part: Any, fit: Fit, *names: str) -> SimpleNamespace:
    dropped = getattr(part, "dropped_attributes", 0)
    values = {name: getattr(part, name) for name in names}
    return SimpleNamespace(attributes=fit(part.attributes), dropped_attributes=dropped, **values)


def _fitting(attributes: Mapping[str, object] | None) -> dict[str, object]:
    return {str(key): _value(value) for key, value in (attributes or {}).items() if value is not None}


def _value(value: object) -> object:
    if isinstance(value, Enum):
        return _value(value.value)
    return sanitize_attribute_value(list(cast(Sequence[object], value)) if isinstance(value, tuple) else value)


def any_attributes(values: Mapping[str, object]) -> Attributes:
    """Flatten and sanitise values; values that cannot be flattened are kept as JSON text. Never raises."""
    try:
        return sanitize_attributes(flatten_attributes(values))
    except Exception:  # keys that are no strings, cycles, a broken __str__: the user's program continues
        return {key: _one(value) for key, value in values.items()}


def _one(value: object) -> Any:
    try:
        return sanitize_attribute_value(value)
    except Exception as error:  # a broken __str__ of the user's must not end the user's program
        return f"<{type(value).__name__}: {type(error).__name__} in __str__>"
