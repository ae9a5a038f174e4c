"""Texts that a stream gives in pieces: joined once, when they are read, since joining at each piece is quadratic."""

from __future__ import annotations

import json
import re

_BLOCK = 64
_STRUCTURE = re.compile(r'["{}\[\]]|\\.?', re.DOTALL)


class Text:
    """A text that grows."""

    __slots__ = ("_blocks", "_length", "_pieces")

    def __init__(self, first: str = "") -> None:
        self._blocks = list[str]()
        """Pieces joined once, since a word takes more room by itself."""
        self._pieces = [first]
        self._length = len(first)

    def add(self, piece: str) -> None:
        self._pieces.append(piece)
        self._length += len(piece)
        if len(self._pieces) >= _BLOCK:
            self._blocks.append("".join(self._pieces))
            self._pieces = []

    def is_just(self, text: str) -> bool:
        """True if this is what has come so far; joins nothing for a text of another length."""
        return len(text) == self._length and text == str(self)

    def __bool__(self) -> bool:
        return self._length > 0

    def __str__(self) -> str:
        if self._blocks or len(self._pieces) != 1:
            self._pieces, self._blocks = ["".join([*self._blocks, *self._pieces])], []
        return self._pieces[0]


class GrowingObject(Text):
    """A JSON text that grows, and whether it is a whole object yet; each piece is looked at once."""

    __slots__ = ("_begun", "_depth", "_escaped", "_in_string", "_over", "_whole")

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._begun = self._in_string = self._escaped = self._over = False
        self._whole: bool | None = None

    def add(self, piece: str) -> None:
        super().add(piece)
        if self._over:  # nothing may follow the end
            self._whole = bool(self._whole) and not piece.strip()
            return
        if self._escaped and piece:
            self._escaped, piece = False, piece[1:]
        if not self._begun and piece.strip():
            self._begun = True
            self._over = not piece.lstrip().startswith("{")
        for found in _STRUCTURE.finditer(piece):
            sign = found[0]
            if sign.startswith("\\"):
                self._escaped = len(sign) == 1
            elif sign == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if sign in "{[" else -1
                self._over = self._depth <= 0
            if self._over:
                return

    @property
    def whole(self) -> bool:
        """True if it is one object, from its first brace to its last."""
        if not self._over:
            return False
        if self._whole is None:
            try:
                self._whole = isinstance(json.loads(str(self)), dict)
            except (ValueError, RecursionError):
                self._whole = False
        return self._whole
