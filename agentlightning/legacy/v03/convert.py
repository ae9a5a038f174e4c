"""Conversion of v0.3 documents to values of this package. Fields without an equivalent are counted."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, cast

from pydantic import BaseModel, ValidationError

from agentlightning.legacy.v03.source import Document, Kind
from agentlightning.types import Attempt, CustomResource, ResourcesUpdate, Rollout, Span
from agentlightning.types.resources import stored_forms

_PLAIN = frozenset((str, int, float, bool, type(None)))
_OWN = ("_id", "partition_id")
"""Fields that the database of v0.3 added to each document."""
_ENDED = ("failed", "succeeded", "cancelled")
_FIELDS: dict[Kind, tuple[str, ...]] = {
    "resources": ("resources_id", "create_time", "update_time", "version", "resources"),
    "rollouts": (
        *("rollout_id", "input", "start_time", "end_time", "mode", "resources_id", "status", "config", "metadata"),
        "attempt",
    ),
    "attempts": (
        *("rollout_id", "attempt_id", "sequence_id", "start_time", "end_time", "status", "worker_id"),
        *("last_heartbeat_time", "metadata"),
    ),
}
"""Fields that v0.3 wrote. A span also keeps all other fields."""
_KINDS_OF_RESOURCES = ("llm", "proxy_llm", "prompt_template")
_LIMITS = ("timeout_seconds", "unresponsive_seconds", "max_attempts", "retry_condition")


class NotCarriedOver(Exception):
    """A document without an equivalent value: `reason` is a short word, the message describes the problem."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Converted(NamedTuple):
    """The value of a document."""

    value: BaseModel
    size: int
    """Size of the value's JSON, in bytes."""
    change: str
    """Description of the difference from the document, or an empty text."""


@dataclass
class Converter:
    """Converts documents, and counts the fields without an equivalent."""

    run_id: str | None = None
    """Run that all values are assigned to."""
    cancel_unfinished: bool = False
    """Convert unfinished rollouts to cancelled ones; False skips them."""
    dropped: Counter[str] = field(default_factory=Counter[str])
    """Fields without an equivalent, such as `rollouts.owner`, with the number of documents that have them."""

    def convert(self, kind: Kind, document: Document) -> Converted:
        """Return the value of a document.

        Raises:
            NotCarriedOver: the document has no equivalent.
        """
        make: dict[Kind, Callable[[Document], tuple[BaseModel, str]]] = {
            "resources": self._resources,
            "rollouts": self._rollout,
            "attempts": self._attempt,
            "spans": self._span,
        }
        try:
            plain = cast("Document", plain_json({key: value for key, value in document.items() if key not in _OWN}))
            if kind in _FIELDS:
                plain = self._known(kind, _FIELDS[kind], plain)
            value, change = make[kind](plain)
            return Converted(value, len(value.__pydantic_serializer__.to_json(value)), change)
        except (ArithmeticError, RecursionError, TypeError, ValueError) as error:  # ValidationError, too
            raise NotCarriedOver("unreadable", _first(error)) from None

    def _known(self, what: str, fields: tuple[str, ...], document: Mapping[str, Any]) -> Document:
        self.dropped.update(f"{what}.{name}" for name in document if name not in fields)
        return {name: document[name] for name in fields if name in document}

    def _resources(self, document: Document) -> tuple[ResourcesUpdate, str]:
        resources = _mapping(document, "resources")
        own = {name: _of_own_kind(resource) for name, resource in resources.items()}
        fields = {**document, "resources": stored_forms(own), "run_id": self.run_id}
        return ResourcesUpdate.model_validate(fields), ""

    def _rollout(self, document: Document) -> tuple[Rollout, str]:
        document.pop("attempt", None)
        limits = self._known("rollouts.config", _LIMITS, _mapping(document, "config"))
        document["config"] = {name: _finite(value) for name, value in limits.items()}
        rollout = Rollout.model_validate({**document, "run_id": self.run_id})
        if rollout.status in _ENDED:
            return rollout, ""
        if not self.cancel_unfinished:
            raise NotCarriedOver("not_ended", f"it is {rollout.status}; --unfinished cancel imports it as cancelled")
        result = rollout.model_copy(update={"status": "cancelled", "end_time": rollout.start_time})
        return result, "rollouts that had not ended: cancelled"

    def _attempt(self, document: Document) -> tuple[Attempt, str]:
        attempt = Attempt.model_validate(document)
        last = attempt.start_time if attempt.last_heartbeat_time is None else attempt.last_heartbeat_time
        if attempt.status in ("preparing", "running"):
            update = {"status": "unresponsive", "outcome": "cancelled", "outcome_reason": "stopped", "end_time": last}
            return attempt.model_copy(update=update), "attempts that had not ended: unresponsive, outcome cancelled"
        return (attempt.model_copy(update={"end_time": last}) if attempt.end_time is None else attempt), ""

    def _span(self, document: Document) -> tuple[Span, str]:
        attributes, change = document.get("attributes"), ""
        if isinstance(attributes, dict) and None in attributes.values():  # the v0.3 server wrote NaN as null
            values = cast("dict[str, Any]", attributes)
            document["attributes"] = {name: value for name, value in values.items() if value is not None}
            change = "spans: attributes without a value removed"
        span = Span.model_validate(document)
        if span.sequence_id < 0:
            raise NotCarriedOver("unreadable", f"sequence_id is {span.sequence_id}; expected 0 or more")
        return span, change


def _mapping(document: Document, name: str) -> Mapping[str, Any]:
    """Return a field that is an object; an empty one if it is missing or null."""
    value: Any = document.get(name)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{name} is a {type(value).__name__}; expected an object")
    return cast("dict[str, Any]", value or {})


def _of_own_kind(resource: Any) -> object:
    """Return a resource; an instance of the program's own class as its values."""
    if not isinstance(resource, dict):
        return resource
    values = cast("dict[str, Any]", resource)
    kind = values.get("resource_type")
    if kind in _KINDS_OF_RESOURCES:
        return values
    rest = {name: value for name, value in values.items() if name != "resource_type"}
    return CustomResource(kind=None if kind is None else str(kind), values=rest)


def plain_json(value: Any) -> Any:
    """Return JSON data from values of BSON and its extended JSON: numbers, times, ids, bytes."""
    if value.__class__ in _PLAIN:
        return value
    if isinstance(value, dict):
        entries = cast("dict[str, Any]", value)
        if len(entries) == 1 and (key := next(iter(entries))) in _EXTENDED:
            return _EXTENDED[key](entries[key])
        return {str(key): plain_json(item) for key, item in entries.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item) for item in cast("list[Any]", value)]
    if isinstance(value, int):
        return int(value)  # converts the driver's 64-bit class
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value)


_EXTENDED: dict[str, Callable[[Any], object]] = {
    "$numberInt": int,
    "$numberLong": int,
    "$numberDouble": float,
    "$numberDecimal": float,
    "$oid": str,
    "$date": plain_json,  # milliseconds, or a time in text
}
"""MongoDB Extended JSON v2: the objects that represent a single value."""


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _first(error: Exception) -> str:
    """Return the first problem, without the value, which may be long or secret."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(str(part) for part in first['loc']) or 'it'}: {first['msg']}"
    return str(error)[:200]
