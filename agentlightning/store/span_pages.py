"""Pages of spans out of their encoded bodies: only what is returned is decoded.

A body is the JSON that `Span` writes, whose third field is the number of the span.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentlightning.types import Span

_decode = Span.__pydantic_validator__.validate_json
_NUMBER = re.compile(r'"sequence_id":(-?\d+)')
_NUMBER_BYTES = re.compile(_NUMBER.pattern.encode())


def decode_all(bodies: Sequence[bytes | str]) -> list[Span]:
    """Return every span, in the order given."""
    return [_decode(body) for body in bodies]


def numbered_page(bodies: Sequence[bytes | str], descending: bool, limit: int, offset: int) -> list[Span]:
    """Return one page in the order of the numbers of the spans; ties keep their order. `limit` -1 is all."""
    ordered = sorted(bodies, key=_number_of, reverse=descending)
    return decode_all(ordered[offset : None if limit == -1 else offset + limit])


def _number_of(body: bytes | str) -> int:
    found = _NUMBER_BYTES.search(body) if isinstance(body, bytes) else _NUMBER.search(body)
    assert found is not None, body[:200]
    return int(found[1])
