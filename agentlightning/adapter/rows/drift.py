"""Tells whether the chat template or the tokenizer turned the same messages into other tokens.

With the model's `decode` the answer is exact: other tokens for the same text are the tokenizer's doing, another text is
the template's. Without it a rule over the tokens and the messages decides, which is good where the reply is plain text.
No token is ever made here.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from typing import Final, Literal

Decode = Callable[[Sequence[int]], str]
"""Token ids to their text, special tokens included."""
DriftCause = Literal["template", "tokenisation"]

_BEFORE: Final = 8
"""Tokens before the parting that are decoded too: a character may begin in them."""


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
        row: The tokens that the prompt should begin with.
        at: The first place where they differ.
        answer_from: Where in the row the policy's last answer begins.
        verbatim: That answer is plain text, which templates show as it is.
        cut_short: It ended at a limit and not at a token of its own.
    """
    if decode is not None:
        return "tokenisation" if _same_text(row, prompt, at, answer_from, decode) else "template"
    ends_alike = at >= len(row) - 1 and not cut_short  # all of it is the same but for the token that ends a turn
    if at < answer_from or ends_alike or not verbatim:
        return "template"
    # a prompt that goes on with the end of the row leaves out what lies between
    later = (place for place in range(at + 1, len(row)) if at < len(prompt) and row[place] == prompt[at])
    left_out = any(list(row[place:]) == list(prompt[at : at + len(row) - place]) for place in later)
    return "template" if left_out else "tokenisation"


def _same_text(row: Sequence[int], prompt: Sequence[int], at: int, answer_from: int, decode: Decode) -> bool:
    """True if the prompt spells the text of the row first. Only what lies around and after the parting is decoded.

    An answer is decoded by itself, as the engine did when it made its text: some tokenizers put a space before a text
    and take it away from the first token that they decode. Nobody can tell such a space from one that was said.
    """
    start = max(0, at - _BEFORE)
    if start < answer_from <= at:
        start = answer_from
    seam = max(start, answer_from)
    spelt = (decode(row[start:seam]) if start < seam else "") + decode(row[seam:])
    said = _comparable(spelt).rstrip("\ufffd")  # the last character may be half there
    before = prompt[start - 1 : start] if start == answer_from else ()
    size = 2 * (len(row) - start) + _BEFORE
    while True:
        part = prompt[start : start + size]
        sent = [_comparable(decode(part))]
        if before:
            sent.append(_comparable(decode([*before, *part]).removeprefix(decode(before))))
        if len(sent[0]) > len(said) or start + size >= len(prompt):
            return any(text.startswith(said) for text in sent)
        size *= 2


def _comparable(text: str) -> str:
    """Return a text in the form in which tokenizers that normalise have it."""
    return unicodedata.normalize("NFKC", text)


def describe_tokens(tokens: Sequence[int], at: int, decode: Decode | None, around: int = 6) -> str:
    """Return the tokens around a position as text, decoded as well if there is a `decode`."""
    start = max(0, at - around)
    window = tokens[start : at + around]
    ids = [*map(str, tokens[start:at]), "|", *map(str, tokens[at : at + around])]
    text = "" if decode is None else f"   {decode(window)!r}"
    return f"{'... ' if start else ''}{' '.join(ids)}{' ...' if at + around < len(tokens) else ''}{text}"
