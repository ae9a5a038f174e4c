"""Removes the key of a model server from its responses and streams, so that no agent sees it.

In a stream the key may arrive in pieces. The texts that an agent joins (those of a delta) are tracked, by choice and
field, and frames wait while such a text ends with the beginning of a key; others are passed on unchanged.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
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
from agentlightning.llm_proxy.endpoints.models import ModelEndpoint
from agentlightning.llm_proxy.sse import data_of, with_data

HIDDEN = "[redacted]"
SHORTEST_KEY = 8
"""Minimum length of a key; shorter ones are placeholders such as `EMPTY`, which also occur in replies."""
_TELLS_NOTHING = 4
"""Number of characters of a key that are passed on if their text does not continue immediately."""
_WHOLE = ("role", "type", "id")
"""Fields below a delta that are complete values."""
_SPELL_TOKENS = ("token_ids", "logprobs", "meta_info", "tokens")
"""Fields of a choice that repeat its text in tokens."""


@lru_cache(maxsize=256)
def secrets_of(endpoint: ModelEndpoint) -> Secrets:
    """Return the secrets of an endpoint."""
    return Secrets(endpoint.secrets)


class Secrets:
    """The keys of one endpoint, in all their encodings."""

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


_Place = tuple[tuple[object, ...], Any, Any]
"""A text of a frame that may continue in later ones: its path, the object or list with it, and its name there."""


@dataclass(slots=True)
class _Tail:
    """The end of a growing text that is the beginning of a key."""

    text: str = ""
    pieces: list[tuple[_Frame, Any, Any, int]] = field(default_factory=list[tuple[_Frame, Any, Any, int]])
    """Its parts: the frame, the place in it, and the number of characters at the end of the text there."""
    waits: bool = True
    """True if its frames wait."""

    @property
    def held(self) -> bool:
        return self.waits and not all(frame.gone for frame, *_ in self.pieces)

    def cut(self, keep: int) -> None:
        """Keep only its first `keep` characters in the frames that are still waiting."""
        for frame, place, name, length in self.pieces:
            if not frame.gone:
                place[name] = place[name][: len(place[name]) - length + min(length, max(0, keep))]
                frame.changed = True
            keep -= length


class KeyWatch:
    """Filters one stream: returns the frames that the agent may see, in the same order."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._held: list[_Frame] = []
        self._tails: dict[tuple[object, ...], _Tail] = {}
        self.hid_key = False
        """True if a key was in it."""

    def feed(self, raw: bytes) -> list[bytes]:
        """Process one frame and return the frames that can be passed on; possibly none."""
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
        places = list(_growing_texts(value))
        for place in places:
            self._follow(place, frame)
        touched = {path for path, _, _ in places}
        choices = objects(value.get("choices"))
        about = {path[0] for path in touched} | ({_index(choice) for choice in choices} or {_index(value)} - {()})
        for path, tail in self._tails.items():
            if path not in touched and len(tail.text) <= _TELLS_NOTHING and (not about or path[0] in about):
                tail.waits = False  # reveals nothing and did not continue, though its choice did
        return self._free()

    def end(self) -> list[bytes]:
        """Return the remaining frames, without texts that are the beginning of a key."""
        for tail in self._tails.values():
            if len(tail.text) >= SHORTEST_KEY and tail.held:
                tail.cut(0)
                self.hid_key = True
        self._tails.clear()
        return self._free()

    def _follow(self, text_place: _Place, frame: _Frame) -> None:
        path, place, name = text_place
        tail = self._tails.pop(path, None) or _Tail()
        while (place_of_key := self._secrets.find(tail.text + place[name])) is not None:
            begin, end = place_of_key
            tail.cut(begin)
            text: str = place[name]
            place[name] = text[: max(0, begin - len(tail.text))] + HIDDEN + text[end - len(tail.text) :]
            frame.changed = self.hid_key = True
            tail = _Tail()
        text = tail.text + place[name]
        length = max((_begun(key, text) for key in self._secrets.keys), default=0)
        if not length:
            return
        fresh = min(length, len(place[name]))
        before, pieces = length - fresh, [(frame, place, name, fresh)] if fresh else []
        for *earlier, size in reversed(tail.pieces):
            if before > 0:
                pieces.insert(0, (earlier[0], earlier[1], earlier[2], min(size, before)))
                before -= size
        self._tails[path] = _Tail(text[len(text) - length :], pieces)

    def _free(self) -> list[bytes]:
        if any(tail.held for tail in self._tails.values()):
            return []
        freed, self._held = self._held, []
        for frame in freed:
            frame.gone = True
        return [frame.bytes() for frame in freed]


def without_tokens(reply: Json) -> Json:
    """Return a reply without the tokens of its choices, because they would reveal the hidden text."""
    if not isinstance(reply.get("choices"), list):
        return reply
    choices = [{k: v for k, v in choice.items() if k not in _SPELL_TOKENS} for choice in objects(reply["choices"])]
    return {**reply, "choices": choices}


def _growing_texts(value: Json) -> Iterator[_Place]:
    """Yield the texts of a frame that an agent joins, in each dialect.

    Those of a delta and of the block that it adds to have the same path.
    """
    owners = [(value, ("delta", "content_block"))]
    owners += [(choice, ("delta", "text")) for choice in objects(value.get("choices"))]
    for owner, names in owners:
        path = (_index(owner),)
        for name in names:
            if isinstance(owner.get(name), str):
                yield (*path, name), owner, name
            else:
                yield from _texts(owner.get(name), path)


def _texts(place: object, path: tuple[object, ...]) -> Iterator[_Place]:
    """Yield the texts within an object or list. Those of an entry continue at the same place of a later list."""
    if not (is_object(place) or is_list(place)):
        return
    for name, value in place.items() if is_object(place) else enumerate(place):
        if name in _WHOLE:
            continue
        key = (_index(fields_of(value)) or name) if is_list(place) else name
        if isinstance(value, str):
            yield (*path, key), place, name
        else:
            yield from _texts(value, (*path, key))


def _index(value: Json) -> tuple[str, ...]:
    """Return the numbers that identify the subject of a frame, a choice or an entry."""
    return tuple(str(value.get(name)) for name in ("index", "output_index", "content_index") if name in value)
