"""A compact response to sent spans: the indexes of the stored spans and the store's changes, without the spans.

The client of this package already has the spans. It requests this response with `X-AGL-Answer: changes`; a server that
does not know the header returns the spans. If the store copied a span, or changed more than its number and its mark (as
your own store can do), the response contains the complete span.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json

from agentlightning.store.rules.values import evolve
from agentlightning.types import Span

CHANGES = "changes"
"""Value of the header."""
_CHANGED_BY_US = frozenset(("sequence_id", "attributes"))
_write = Span.__pydantic_serializer__.to_json
_read = Span.__pydantic_validator__.validate_python


@dataclass(frozen=True, slots=True)
class StoredSpans:
    """Spans that were passed to a store, and those that it returned, in the same order."""

    given: Sequence[Span]
    stored: Sequence[Span]

    def to_json(self) -> bytes:
        """Return a list with one entry for each stored span: the index of the sent span and its changes, or the
        complete span."""
        entries: list[bytes] = []
        place = 0
        for span in self.stored:
            while place < len(self.given) and not _is_same(self.given[place], span):
                place += 1
            original = self.given[place] if place < len(self.given) else None
            if original is span:
                entries.append(b"%d" % place)
            elif original is None or not (changes := _changes(original, span)).keys() <= _CHANGED_BY_US:
                entries.append(_write(span))
            else:
                entries.append(to_json({"place": place, **changes}, inf_nan_mode="constants"))
            place += 1
        return b'{"stored":[%s]}' % b",".join(entries)


def spans_of_answer(given: Sequence[Span], content: bytes) -> list[Span] | None:
    """Return the stored spans, with the sent objects for unchanged spans; None if the server does not know this form of
    response and sent the spans."""
    if not content.startswith(b'{"stored":'):
        return None
    spans: list[Span] = []
    entries: list[int | dict[str, Any]] = from_json(content)["stored"]
    for entry in entries:
        if isinstance(entry, int):
            spans.append(given[entry])
        elif "place" in entry:
            place: int = entry.pop("place")
            spans.append(evolve(given[place], **entry))
        else:
            spans.append(_read(entry))
    return spans


def _is_same(original: Span, stored: Span) -> bool:
    return original is stored or (
        original.span_id == stored.span_id
        and original.attempt_id == stored.attempt_id
        and original.rollout_id == stored.rollout_id
    )


def _changes(original: Span, stored: Span) -> dict[str, Any]:
    """Return the fields that are different objects; for a copy, all fields."""
    before = original.__dict__
    changed = {name: value for name, value in stored.__dict__.items() if value is not before.get(name)}
    if stored.__pydantic_extra__ is not original.__pydantic_extra__:
        changed["__pydantic_extra__"] = None
    return changed
