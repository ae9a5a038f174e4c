"""The answer to sent spans, without the spans themselves: the stored ones, and the store's changes of them.

The client of this package has the spans that it stores. It requests this answer by `X-AGL-Answer: changes`; a server
that does not know the header returns the spans. If the store changed more of a span than its number and its mark (as a
user's store may), or made copies, the answer holds the span itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json

from agentlightning.store.rules.values import evolve
from agentlightning.types import Span

CHANGES = "changes"
"""The value of the header."""
_CHANGED_BY_US = frozenset(("sequence_id", "attributes"))
_write = Span.__pydantic_serializer__.to_json
_read = Span.__pydantic_validator__.validate_python


@dataclass(frozen=True, slots=True)
class StoredSpans:
    """Spans that were passed to a store, and those that it returned, in the same order."""

    given: Sequence[Span]
    stored: Sequence[Span]

    def to_json(self) -> bytes:
        """Return a list with an entry for each stored span: the index of the given span, with its changes; or the whole
        span."""
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
    """Return the stored spans, using the given objects for unchanged ones; None if the answer has another form, because
    a server that does not know this one sent the spans."""
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
    """Return the fields that are not the same objects; all fields of a copy."""
    before = original.__dict__
    changed = {name: value for name, value in stored.__dict__.items() if value is not before.get(name)}
    if stored.__pydantic_extra__ is not original.__pydantic_extra__:
        changed["__pydantic_extra__"] = None
    return changed
