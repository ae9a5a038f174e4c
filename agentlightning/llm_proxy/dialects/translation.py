"""The parts that translations of requests into chat completions share: each field is read, or refused by its name."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from agentlightning.llm_proxy.access.limits import shown
from agentlightning.llm_proxy.dialects.json_values import Json, is_list, is_object, wrong_type
from agentlightning.llm_proxy.replies import CallFailed

logger = logging.getLogger(__name__)

Harmless = Mapping[str, tuple[object, ...]]
"""Values of fields that ask for what holds anyway."""
_noted: set[str] = set()


# --- fields ----------------------------------------------------------------------------------------------------------


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


def text_in(fields: Json, name: str, place: str) -> str:
    """Return the string in a field of an object that stands at `place`.

    Raises:
        CallFailed: 400, it is none.
    """
    return as_text(fields.get(name), f"{place}.{name}")


def some_of(fields: Json, names: Iterable[str]) -> Json:
    """Return the fields of these names that are there and not null."""
    return {name: fields[name] for name in names if fields.get(name) is not None}


# --- messages and tools ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class AssistantTurn:
    """One turn of the assistant: its thoughts, words and calls in one message of a chat."""

    thoughts: list[str] = field(default_factory=list[str])
    texts: list[str] = field(default_factory=list[str])
    calls: list[Json] = field(default_factory=list[Json])

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call of a tool."""
        self.calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    @property
    def message(self) -> Json:
        message: Json = {"role": "assistant", "content": "".join(self.texts) if self.texts else None}
        message.update({"tool_calls": self.calls} if self.calls else {})
        message.update({"reasoning_content": "".join(self.thoughts)} if any(self.thoughts) else {})
        return message


def texts_joined(parts: list[Json], between: str) -> str | list[Json]:
    """Return parts of text as one text, others as they are."""
    return between.join(part["text"] for part in parts) if all(part["type"] == "text" for part in parts) else parts


def named_function(name: str) -> Json:
    """Return the `tool_choice` of one function."""
    return {"tool_choice": {"type": "function", "function": {"name": name}}}
