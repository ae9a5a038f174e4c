"""The text of each token id, so that who looks at a recorded row needs no tokenizer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


def vocabulary_of(tokenizer: Any) -> list[str]:
    """Return the text of each token id of a transformers tokenizer; `""` for an id without a token.

    Bytes of byte-level and of sentencepiece tokenizers become the characters that they are; a part of a character,
    which is no UTF-8, is shown as `\\xe2`.
    """
    pieces: Sequence[str | None] = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    decoder = str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
    readable = _byte_level if "ByteLevel" in decoder else _sentencepiece
    return ["" if piece is None else piece if index in added else readable(piece) for index, piece in enumerate(pieces)]


def vocabulary_id(tokens: Sequence[str]) -> str:
    """Return the id of a table of texts: the SHA-256 of its JSON."""
    return hashlib.sha256(json.dumps(list(tokens), ensure_ascii=True, separators=(",", ":")).encode()).hexdigest()


def _sentencepiece(piece: str) -> str:
    if (byte := _BYTE.fullmatch(piece)) is not None:
        return _text_of(bytes.fromhex(byte[1]))
    return piece.replace(_SPACE, " ")


def _byte_level(piece: str) -> str:
    if not all(character in _BYTES for character in piece):  # a token that was added as text
        return piece
    return _text_of(bytes(_BYTES[character] for character in piece))


def _text_of(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def _bytes_by_character() -> dict[str, int]:
    """Return the byte of each character of a byte-level piece: printable ones stand for themselves, the others follow
    from U+0100 on (GPT-2, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTES = _bytes_by_character()
