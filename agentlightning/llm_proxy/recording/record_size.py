"""Bounds the record of a call: parts that are too large become their SHA-256 and size; the record itself is kept.

What counts is the size on the way to a store (JSON in ASCII), where a control character and an umlaut take six bytes
and a log-probability about twenty. Texts go before tokens, since only the tokens can be trained on; of each the largest
first.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from pydantic_core import to_json

from agentlightning.types import AttributeValue

NOT_KEPT: Final = "agentlightning.call.not_kept"
"""The key of one part that stands for all that were left out."""
_MANY = ("gen_ai.prompt.", "llm.request.functions.")
"""Begins of the keys of which there may be very many."""
_EACH = 8
"""Bytes around a key and a value."""
_STAND_IN = 128
"""Bytes of what stands for a part."""


@dataclass(slots=True)
class Part:
    """One attribute of one of the spans."""

    span: int
    key: str
    value: AttributeValue
    is_token: bool = False
    """A list of token ids or log-probabilities; not replaced by a text but left out."""
    size: int = 0

    def measure(self) -> None:
        value, size = self.value, _EACH + len(self.key)
        if isinstance(value, str) and not value.isascii():
            ascii_only = value.encode("ascii", "ignore").decode()
            units = len(value.encode("utf-16-le", "surrogatepass")) // 2
            self.size = size + len(to_json(ascii_only)) + 6 * (units - len(ascii_only))
        else:
            self.size = size + len(to_json(value, inf_nan_mode="constants"))


def fitting(parts: list[Part], budget: int) -> list[Part]:
    """Return the parts with what is too large replaced, so that together they take no more than `budget` bytes.

    Parts that say how the call ended are short and always there.
    """
    for part in parts:
        part.measure()
    total = sum(part.size for part in parts)
    if total <= budget:
        return parts
    texts = [part for part in parts if isinstance(part.value, str) and part.size > _STAND_IN + 200]
    for part in sorted(texts, key=lambda part: -part.size):
        if total > budget:
            total -= part.size
            part.value = stand_in(str(part.value).encode())
            part.measure()
            total += part.size
    if total > budget:
        parts, total = _gathered(parts, total, budget)
    if total > budget:
        tokens = sorted((part for part in parts if part.is_token), key=lambda part: -part.size)
        for part in tokens:
            if total > budget:
                parts, total = [other for other in parts if other is not part], total - part.size
    return parts


def stand_in(raw: bytes, what: str = "") -> str:
    """Return what is kept of something too large to keep."""
    return f"[not kept: {what}{len(raw)} bytes, sha256 {hashlib.sha256(raw).hexdigest()}]"


def _gathered(parts: list[Part], total: int, budget: int) -> tuple[list[Part], int]:
    """Leave out the last of very many texts; one part stands for them."""
    left_out: list[Part] = []
    kept: list[Part] = []
    for part in reversed(parts):
        if total + _STAND_IN + len(NOT_KEPT) > budget and part.key.startswith(_MANY):
            left_out.append(part)
            total -= part.size
        else:
            kept.append(part)
    if not left_out:
        return parts, total
    raw = b"".join(to_json([part.key, part.value]) for part in reversed(left_out))
    note = Part(0, NOT_KEPT, stand_in(raw, f"{len(left_out)} attributes, "))
    note.measure()
    return [*reversed(kept), note], total + note.size
