"""Removes the key of a model server from its responses, whole ones and streams, so that no agent sees it.

In a stream the key may arrive in pieces. All texts of its frames are tracked, by choice and field, and frames are held
back while a text ends with the beginning of a key; all others pass unchanged. For texts that an agent concatenates
(those of a delta) one character is enough; for other fields, which hold whole values, more than a few must match.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from urllib.parse import quote

from agentlightning.llm_proxy.dialects.json_values import (
    Json,
    fields_of,
    is_list,
    is_object,
    json_bytes,
    objects,
    read_json,
)
from agentlightning.llm_proxy.sse import data_of, with_data

HIDDEN = "[redacted]"
SHORTEST_KEY = 8
"""Minimum length of a key; shorter ones are placeholders such as `EMPTY`, which also occur in replies."""
_TELLS_NOTHING = 4
"""Number of characters of a key that are passed on when their text does not continue at once."""
_WHOLE = ("role", "type", "id")
"""Fields below a delta that are whole values."""
_CONSTANT = ("object", "model", "finish_reason", "stop_reason")
"""Values that a server repeats or sends once: no frame waits for their continuation."""
_GROWING, _WHOLE_VALUE, _CONSTANT_VALUE = 1, _TELLS_NOTHING + 1, 2**31
_MOST_FOLLOWED = 4096
"""Number of texts whose end is remembered though no frame waits for them."""
_SPELL_TOKENS = ("token_ids", "logprobs", "meta_info", "tokens")
"""Fields of a choice that repeat its text in tokens."""


class Secrets:
    """The keys of one endpoint, in all their spellings."""

    def __init__(self, keys: Iterable[str | None]) -> None:
        self.keys = [key for key in dict.fromkeys(keys) if key and len(key) >= SHORTEST_KEY]
        self._forms = [form for key in self.keys for form in _forms(key)]

    def hide(self, body: bytes) -> tuple[bytes, bool]:
        """Return a body without the keys, and whether one was in it."""
        if not self.keys:
            return body, False
        result = body
        if b"\\u" in body or b"\\/" in body:  # other ways to write the same letters in JSON
            value = read_json(body)
            canonical = b"" if value is None else json_bytes(value)
            result = canonical if any(form in canonical for form in self._forms) else body
        hidden = False
        for form in self._forms:
            if form in result:
                result, hidden = result.replace(form, HIDDEN.encode()), True
        return result, hidden

    def find(self, text: str) -> tuple[int, int] | None:
        """Return the beginning and the end of the first key."""
        places = [(at, at + len(key)) for key in self.keys if (at := text.find(key)) >= 0]
        return min(places, default=None)


def _forms(key: str) -> list[bytes]:
    escaped = json.dumps(key)[1:-1]
    forms = (escaped, json.dumps(escaped)[1:-1], key, quote(key, safe=""))
    return [*(form.encode() for form in dict.fromkeys(forms)), base64.b64encode(key.encode()).rstrip(b"=")]


def _begun(key: str, text: str) -> int:
    """Return the number of last characters of a text that are the beginning of the key, but not all of it."""
    end = text[1 - len(key) :]
    at = end.find(key[0])
    while at >= 0:
        if key.startswith(end[at:]):
            return len(end) - at
        at = end.find(key[0], at + 1)
    return 0


@dataclass(slots=True, eq=False)
class _Frame:
    raw: bytes
    value: Json | None = None
    changed: bool = False
    gone: bool = False
    """True after it was passed on."""

    def bytes(self) -> bytes:
        if not self.changed:
            return self.raw
        assert self.value is not None
        for choice in objects(self.value.get("choices")):
            for name in _SPELL_TOKENS:
                choice.pop(name, None)
        return with_data(self.raw, json_bytes(self.value))


@dataclass(slots=True)
class _Piece:
    """The last `length` characters of one text of a frame."""

    frame: _Frame
    place: Any
    name: Any
    length: int
    waits: bool = True
    """True if it holds its frame back."""

    @property
    def held(self) -> bool:
        return self.waits and not self.frame.gone

    def keep(self, length: int) -> None:
        """Keep only the first of these characters."""
        text = self.place[self.name]
        self.place[self.name] = text[: len(text) - self.length + length]
        self.frame.changed = True


@dataclass(slots=True)
class _Tail:
    """The end of a growing text that is the beginning of a key."""

    text: str = ""
    pieces: list[_Piece] = field(default_factory=list["_Piece"])

    @property
    def held(self) -> bool:
        return any(piece.held for piece in self.pieces)

    def cut(self, keep: int) -> None:
        """Keep only the first `keep` characters of it in the frames that are still here."""
        for piece in self.pieces:
            if not piece.frame.gone:
                piece.keep(min(piece.length, max(0, keep)))
            keep -= piece.length


class KeyWatch:
    """Filters one stream. It returns only what the agent may see, in the same order."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._held: list[_Frame] = []
        self._tails: dict[tuple[object, ...], _Tail] = {}
        self.hid_key = False
        """True if a key was in it."""

    def feed(self, raw: bytes) -> list[bytes]:
        """Take one frame and return those that can be passed on, possibly none."""
        visible, hidden = self._secrets.hide(raw)
        data = data_of(visible)
        if data is not None and (b"\\u" in raw or b"\\/" in raw):
            clean, inside = self._secrets.hide(data)
            if inside:
                visible, hidden = visible.replace(data, clean), True
                data = data_of(visible)
        self.hid_key |= hidden
        value = None if data is None else read_json(data)
        frame = _Frame(visible, value, changed=hidden and value is not None)
        self._held.append(frame)
        if value is None:
            return self.end() if data is not None else self._free()
        touched: set[tuple[object, ...]] = set()
        choices = objects(value.get("choices"))
        places = [(value, ("delta", "content_block"), "delta"), *((choice, ("delta",), "text") for choice in choices)]
        for place, deltas, name in places:
            for text in _top(place, deltas, name):
                if text.least == _GROWING:
                    touched.add(text.path)
                self._follow(text, frame)
        about = {path[0] for path in touched} | ({_index(choice) for choice in choices} or {_index(value)} - {()})
        for path, tail in self._tails.items():
            if path not in touched and len(tail.text) <= _TELLS_NOTHING and (not about or path[0] in about):
                for piece in tail.pieces:
                    piece.waits = False  # reveals nothing and did not continue, though its choice did
        return self._free()

    def end(self) -> list[bytes]:
        """Return the remaining frames, without texts that are the first half of a key."""
        for tail in self._tails.values():
            if len(tail.text) >= SHORTEST_KEY and tail.held:
                tail.cut(0)
                self.hid_key = True
        self._tails.clear()
        return self._free()

    def _follow(self, entry: _Text, frame: _Frame) -> None:
        path, place, name = entry.path, entry.place, entry.name
        tail = self._tails.get(path) or _Tail()
        while (place_of_key := self._secrets.find(tail.text + place[name])) is not None:
            begin, end = place_of_key
            tail.cut(begin)
            text: str = place[name]
            place[name] = text[: max(0, begin - len(tail.text))] + HIDDEN + text[end - len(tail.text) :]
            frame.changed = self.hid_key = True
            tail = _Tail()
        text = tail.text + place[name]
        length = max((_begun(key, text) for key in self._secrets.keys), default=0)
        waits = length >= entry.least
        if not length or (not waits and path not in self._tails and len(self._tails) >= _MOST_FOLLOWED):
            self._tails.pop(path, None)
            return
        fresh = _Piece(frame, place, name, min(length, len(place[name])), waits)
        before, pieces = length - fresh.length, list[_Piece]()
        for piece in reversed(tail.pieces):
            if before > 0:
                pieces.insert(0, replace(piece, length=min(piece.length, before)))
                before -= piece.length
        self._tails[path] = _Tail(text[len(text) - length :], [*pieces, fresh] if fresh.length else pieces)

    def _free(self) -> list[bytes]:
        if any(tail.held for tail in self._tails.values()):
            return []
        freed, self._held = self._held, []
        for frame in freed:
            frame.gone = True
        return [frame.bytes() for frame in freed]


def without_tokens(reply: Json) -> Json:
    """Return a reply without the tokens of its choices, which spell the text hidden in its texts."""
    if not isinstance(reply.get("choices"), list):
        return reply
    choices = [{k: v for k, v in choice.items() if k not in _SPELL_TOKENS} for choice in objects(reply["choices"])]
    return {**reply, "choices": choices}


class _Text(NamedTuple):
    """A text of a frame that may continue in later ones: its path and its place."""

    path: tuple[object, ...]
    place: Any
    """The object or list that holds it."""
    name: Any
    least: int
    """Characters of a key at its end that hold the frame back: `_GROWING`, `_WHOLE_VALUE` or `_CONSTANT_VALUE`."""


def _top(place: Json, deltas: tuple[str, ...], text: str) -> Iterator[_Text]:
    """Return the texts of a frame or a choice, without those of a frame's choices.

    Those of a delta and of the block that it adds to have the same path.
    """
    owner = (_index(place),)
    for name, value in place.items():
        if isinstance(value, str):
            yield _Text((*owner, name), place, name, _GROWING if name in (text, "delta") else _least(name, False))
        elif name in deltas:
            yield from _texts(value, owner, True)
        elif name != "choices":
            yield from _texts(value, (*owner, name), False, name in _SPELL_TOKENS)


def _texts(place: object, path: tuple[object, ...], grows: bool, in_row: bool = False) -> Iterator[_Text]:
    """Return texts of an object or list. Those of a list's entries continue at the same place of a later list; if they
    are `in_row`, in the next entry."""
    if is_object(place):
        for name, value in place.items():
            if isinstance(value, str):
                yield _Text((*path, name), place, name, _least(name, grows))
            elif is_list(value) or is_object(value):
                yield from _texts(value, (*path, name), grows, in_row)
    elif is_list(place):
        for number, entry in enumerate(place):
            fields = fields_of(entry)
            which = () if in_row else (_index(fields) if "index" in fields else number,)
            if isinstance(entry, str):
                yield _Text((*path, *which), place, number, _GROWING if grows else _WHOLE_VALUE)
            elif is_list(entry) or is_object(entry):
                yield from _texts(entry, (*path, *which), grows, in_row)


def _least(name: str, grows: bool) -> int:
    if name in _CONSTANT:
        return _CONSTANT_VALUE
    return _GROWING if grows and name not in _WHOLE else _WHOLE_VALUE


def _index(value: Json) -> tuple[str, ...]:
    """Return the numbers that identify the subject of a frame, a choice or an entry."""
    return tuple(str(value.get(name)) for name in ("index", "output_index", "content_index") if name in value)
