"""Reading the fields of a request that is to be translated: each is read, or the request is refused by its name."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping

from agentlightning.llm_proxy.access.limits import shown
from agentlightning.llm_proxy.dialects.json_values import Json, is_list, is_object, wrong_type
from agentlightning.llm_proxy.replies import CallFailed

logger = logging.getLogger(__name__)

Harmless = Mapping[str, tuple[object, ...]]
"""Values of fields that ask for what holds anyway."""


def untranslatable(field: str, why: str) -> CallFailed:
    """Return the refusal of a field that chat completions cannot express."""
    text = f"{field!r} cannot be served: {why}. The model server behind this gateway speaks chat completions only"
    return CallFailed(400, text, param=field, code="unsupported_value")


def note_ignored(field: str) -> None:
    """Log once in this process that a field is let pass and does nothing; for names that stand in our lists."""
    kind = re.sub(r"\[\d+\]", "[]", field)
    if kind not in _noted:
        _noted.add(kind)
        logger.warning("requests with the field %r are served as if it were not there; this is said once", kind)


_noted: set[str] = set()


def refuse_unknown(
    request: Json,
    known: Iterable[str],
    place: str = "",
    harmless: Harmless | None = None,
    ignored: Iterable[str] = (),
) -> None:
    """Refuse a request with a field that nobody here reads. `harmless` values of others say what holds anyway.

    A field that is `ignored` is let pass: it may be left undone without a change of what the reply means.

    Raises:
        CallFailed: 400 that names the field.
    """
    harmless = harmless or {}
    for name, value in request.items():
        if name in known or value is None or value in harmless.get(name, ()):
            continue
        if name in ignored:
            note_ignored(place + name)
            continue
        instead = ", ".join(repr(other) for other in harmless.get(name, ()))
        why = f"{shown(value)} has no counterpart there" if instead else "it has no counterpart there"
        raise untranslatable(place + name, f"{why}; possible: {instead}" if instead else why)


def as_object(value: object, place: str) -> Json:
    """Return an object.

    Raises:
        CallFailed: 400, it is none.
    """
    if not is_object(value):
        raise wrong_type(place, "an object")
    return value


def as_objects(value: object, place: str) -> list[tuple[Json, str]]:
    """Return the objects of a list, each with its place.

    Raises:
        CallFailed: 400, it is no list of objects.
    """
    if not is_list(value):
        raise wrong_type(place, "a list")
    places = [(entry, f"{place}[{index}]") for index, entry in enumerate(value)]
    return [(as_object(entry, where), where) for entry, where in places]


def as_text(value: object, place: str) -> str:
    """Return a string.

    Raises:
        CallFailed: 400, it is none.
    """
    if not isinstance(value, str):
        raise wrong_type(place, "a string")
    return value
