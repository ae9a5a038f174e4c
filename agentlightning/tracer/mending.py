"""What is changed on a span before it is stored: texts that no store can hold are mended, keys that are known by their
shape are hidden, and the span says where."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agentlightning.semconv import CHANGED_TEXTS, HIDDEN_KEYS
from agentlightning.types import Span
from agentlightning.utils.texts import attributes_without_keys, fitting, fitting_attributes, without_keys

Text = Callable[[str], str]
"""Returns a text as it is to be; the same object if nothing changes."""
Attributes = Callable[[Mapping[str, object]], tuple[dict[str, object], list[str]] | None]
"""The same for attributes, with the keys where something changed; None if nothing does."""


def mended_span(span: Span) -> Span:
    """Return the span with texts that UTF-8 can hold; the same object if there is nothing to mend."""
    return _rewritten(span, fitting, fitting_attributes, CHANGED_TEXTS, names=True)


def span_without_keys(span: Span) -> Span:
    """Return the span without keys that are known by their shape, wherever they stand; the same object if it has none.

    Token ids and numbers are never touched.
    """
    return _rewritten(span, without_keys, attributes_without_keys, HIDDEN_KEYS, names=False)


def _rewritten(span: Span, text: Text, attributes: Attributes, marker: str, *, names: bool) -> Span:
    """Apply both functions to all texts of a span (names only if asked to) and list what changed under `marker`."""
    changed: list[str] = []
    changes: dict[str, object] = {}
    if names and (name := text(span.name)) is not span.name:
        changes["name"] = name
        changed.append("name")
    description = span.status.description
    if description is not None and (kept := text(description)) is not description:
        changes["status"] = span.status.model_copy(update={"description": kept})
        changed.append("status.description")
    for part in ("events", "links"):
        parts = getattr(span, part)
        found: list[Any] = []
        for each in parts:
            new: dict[str, object] = {}
            name = getattr(each, "name", None)  # of an event
            if names and isinstance(name, str) and (fit := text(name)) is not name:
                new["name"] = fit
                changed.append("events.name")
            if (own := attributes(each.attributes or {})) is not None:
                new["attributes"] = own[0]
                changed += own[1]
            found.append(each.model_copy(update=new) if new else each)
        if any(new is not old for new, old in zip(found, parts, strict=True)):
            changes[part] = found
    if (resource := attributes(span.resource.attributes)) is not None:
        changes["resource"] = span.resource.model_copy(update={"attributes": resource[0]})
        changed += resource[1]
    own = attributes(span.attributes)
    if own is not None:
        changed += own[1]
    if not changed:
        return span
    return span.model_copy(
        update={**changes, "attributes": {**(span.attributes if own is None else own[0]), marker: changed}}
    )
