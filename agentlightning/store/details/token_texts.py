"""Token ids as texts, by the table that a run has stored of its tokenizer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from agentlightning.errors import BadRequestError
from agentlightning.types import TokenText

MOST: Final = 200_000
_PARTIAL = re.compile(r"\\x[89a-f][0-9a-f]")
"""How a table writes a byte that is a part of a character."""


def check_token_ids(token_ids: Sequence[int]) -> None:
    """Return if there are not too many.

    Raises:
        BadRequestError: there are.
    """
    if len(token_ids) > MOST:
        raise BadRequestError(f"At most {MOST:,} token ids are turned into texts at once; got {len(token_ids):,}")


def texts_of(tokens: Sequence[str], token_ids: Sequence[int]) -> list[TokenText]:
    """Return the text of each id; None for one that the table does not have."""
    found: list[TokenText] = []
    for token_id in token_ids:
        text = tokens[token_id] if 0 <= token_id < len(tokens) else None
        partial = text is not None and _PARTIAL.search(text) is not None
        found.append(TokenText.model_construct(id=token_id, text=text, partial=partial))
    return found
