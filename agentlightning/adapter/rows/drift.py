"""Detects whether the chat template or the tokenizer rendered the same messages as other tokens.

With the model's `decode`, the result is exact: other tokens for the same text come from the tokenizer, another text
from the template. Without it, a rule over the tokens and the messages decides, which is reliable if the reply is plain
text. No tokens are created here.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from typing import Final, Literal

Decode = Callable[[Sequence[int]], str]
"""Converts token ids to their text, special tokens included."""
DriftCause = Literal["template", "tokenisation"]

_BEFORE: Final = 8
"""Number of tokens before the difference that are also decoded, because a character may begin in them."""


def drift_cause(
    row: Sequence[int],
    prompt: Sequence[int],
    at: int,
    *,
    answer_from: int,
    verbatim: bool,
    cut_short: bool,
    decode: Decode | None,
) -> DriftCause:
    """Return why a prompt with the messages of a row begins with other tokens.

    Args:
        row: The expected first tokens of the prompt.
        at: The first position where they differ.
        answer_from: Position in the row where the policy's last answer begins.
        verbatim: True if that answer is plain text, which templates render unchanged.
        cut_short: True if the answer ended at a limit and not at an end token.
    """
    if decode is not None:
        return "tokenisation" if _same_text(row, prompt, at, answer_from, decode) else "template"
    ends_alike = at >= len(row) - 1 and not cut_short  # equal except for the token that ends a turn
    if at < answer_from or ends_alike or not verbatim:
        return "template"
    # a prompt that continues with the end of the row lacks the part between
    later = (place for place in range(at + 1, len(row)) if at < len(prompt) and row[place] == prompt[at])
    left_out = any(list(row[place:]) == list(prompt[at : at + len(row) - place]) for place in later)
    return "template" if left_out else "tokenisation"


def _same_text(row: Sequence[int], prompt: Sequence[int], at: int, answer_from: int, decode: Decode) -> bool:
    """True if the prompt spells the text of the row first. Only the part around and after the difference is decoded.

    An answer is decoded by itself, as the engine did when it made its text: some tokenizers add a space before a text
    and remove it from the first token that they decode. Such a space cannot be distinguished from a generated one.
    """
    start = max(0, at - _BEFORE)
    if start < answer_from <= at:
        start = answer_from
    seam = max(start, answer_from)
    row_text = (decode(row[start:seam]) if start < seam else "") + decode(row[seam:])
    expected = _comparable(row_text).rstrip("\ufffd")  # the last character may be incomplete there
    before = prompt[start - 1 : start] if start == answer_from else ()
    size = 2 * (len(row) - start) + _BEFORE
    while True:
        part = prompt[start : start + size]
        candidates = [_comparable(decode(part))]
        if before:
            candidates.append(_comparable(decode([*before, *part]).removeprefix(decode(before))))
        if len(candidates[0]) > len(expected) or start + size >= len(prompt):
            return any(text.startswith(expected) for text in candidates)
        size *= 2


def _comparable(text: str) -> str:
    """Return a text in the form that normalising tokenizers give it."""
    return unicodedata.normalize("NFKC", text)


def describe_tokens(tokens: Sequence[int], at: int, decode: Decode | None, around: int = 6) -> str:
    """Return the tokens around a position as text, also decoded if `decode` is given."""
    start = max(0, at - around)
    window = tokens[start : at + around]
    ids = [*map(str, tokens[start:at]), "|", *map(str, tokens[at : at + around])]
    text = "" if decode is None else f"   {decode(window)!r}"
    return f"{'... ' if start else ''}{' '.join(ids)}{' ...' if at + around < len(tokens) else ''}{text}"
