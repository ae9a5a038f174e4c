"""Thoughts in the opaque form in which clients keep them: to be sent back, not to be read or written by others.

OpenAI's `encrypted_content` holds the thought itself here, with a code that only this process makes, so that a client
that keeps nothing else gives back exactly what the model thought. It hides nothing: the thought stands in the clear
beside it. Anthropic's `signature` is such a code alone, since its clients send the thought back too.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets

_KEY = secrets.token_bytes(32)
_CODE = 32
"""Bytes of the code, in front of the text."""


def sealed(text: str) -> str:
    """Return an opaque form of a text."""
    raw = text.encode("utf-8", "surrogatepass")
    return base64.urlsafe_b64encode(hmac.digest(_KEY, raw, "sha256") + raw).decode()


def unsealed(value: str) -> str | None:
    """Return the text of an opaque form; None if this process did not make it."""
    try:
        raw = base64.b64decode(value.encode("ascii"), b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    if not hmac.compare_digest(raw[:_CODE], hmac.digest(_KEY, raw[_CODE:], "sha256")):
        return None
    return raw[_CODE:].decode("utf-8", "surrogatepass")


class Signature:
    """The code of a text that comes in pieces."""

    def __init__(self, text: str = "") -> None:
        self._code = hmac.new(_KEY, digestmod="sha256")
        self.add(text)

    def add(self, piece: str) -> None:
        self._code.update(piece.encode("utf-8", "surrogatepass"))

    def __str__(self) -> str:
        return base64.urlsafe_b64encode(self._code.digest()).decode()
