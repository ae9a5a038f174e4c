"""The answer to spans that were sent, without sending them back: which were stored, and what the store changed of them.

A client of ours that stores spans has them already. It asks for this answer by `X-AGL-Answer: changes`, and a server
that does not know the header answers with the spans. Where the store changed a span in other ways than by its number
and by marking it (a store of a user's own may), or made copies, the span itself stands in the answer.
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
    """Spans as they were given to a store, and those that it answered, in the same order."""

    given: Sequence[Span]
    stored: Sequence[Span]

    def to_json(self) -> bytes:
        """Return a list with an entry for each stored span: the place of the given one that it is, with what changed
        of it; or the whole span."""
        entries: list[bytes] = []
        place = 0
        for span in self.stored:
            while place < len(self.given) and not _is_same(self.given[place], span):
                place += 1
            given = self.given[place] if place < len(self.given) else None
            if given is span:
                entries.append(b"%d" % place)
            elif given is None or not (changes := _changes(given, span)).keys() <= _CHANGED_BY_US:
                entries.append(_write(span))
            else:
                entries.append(to_json({"place": place, **changes}, inf_nan_mode="constants"))
            place += 1
        return b'{"stored":[%s]}' % b",".join(entries)


def spans_of_answer(given: Sequence[Span], content: bytes) -> list[Span] | None:
    """Return the spans that were stored, those that did not change being the given ones; None if the answer has another
    form: a server that does not know this one sent the spans."""
    if not content.startswith(b'{"stored":'):
        return None
    spans: list[Span] = []
    told: list[int | dict[str, Any]] = from_json(content)["stored"]
    for entry in told:
        if isinstance(entry, int):
            spans.append(given[entry])
        elif "place" in entry:
            place: int = entry.pop("place")
            spans.append(evolve(given[place], **entry))
        else:
            spans.append(_read(entry))
    return spans


def _is_same(given: Span, stored: Span) -> bool:
    return given is stored or (
        given.span_id == stored.span_id
        and given.attempt_id == stored.attempt_id
        and given.rollout_id == stored.rollout_id
    )


def _changes(given: Span, stored: Span) -> dict[str, Any]:
    """Return the fields that are not the same objects; all fields of a copy."""
    before = given.__dict__
    changed = {name: value for name, value in stored.__dict__.items() if value is not before.get(name)}
    if stored.__pydantic_extra__ is not given.__pydantic_extra__:
        changed["__pydantic_extra__"] = None
    return changed
