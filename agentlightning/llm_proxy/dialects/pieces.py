"""Replies in pieces: growing texts, the tool calls of a stream, and the parts of a chat reply in order.

Pieces of a text are joined once, when they are read, because joining at each piece takes quadratic time.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from typing_extensions import override

from agentlightning.llm_proxy.access.limits import shown
from agentlightning.llm_proxy.dialects.base import StreamWriter
from agentlightning.llm_proxy.dialects.json_values import Json, object_in, objects, text_of
from agentlightning.llm_proxy.replies import unusable

_BLOCK = 64


class Text:
    """A text that grows."""

    __slots__ = ("_blocks", "_length", "_pieces")

    def __init__(self, first: str = "") -> None:
        self._blocks = list[str]()
        """Joined pieces; fewer strings take less memory."""
        self._pieces = [first]
        self._length = len(first)

    def add(self, piece: str) -> None:
        self._pieces.append(piece)
        self._length += len(piece)
        if len(self._pieces) >= _BLOCK:
            self._blocks.append("".join(self._pieces))
            self._pieces = []

    def is_just(self, text: str) -> bool:
        """True if the text is equal to the received text; does not join the pieces if the lengths differ."""
        return len(text) == self._length and text == str(self)

    def __bool__(self) -> bool:
        return self._length > 0

    def __str__(self) -> str:
        if self._blocks or len(self._pieces) != 1:
            self._pieces, self._blocks = ["".join([*self._blocks, *self._pieces])], []
        return self._pieces[0]


# --- tool calls ------------------------------------------------------------------------------------------------------


class MessageToolCall(NamedTuple):
    """One tool call of a message."""

    id: str
    name: str
    arguments: str
    """A piece of the JSON that the model wrote."""


@dataclass(slots=True)
class _Pending:
    """One tool call of a stream."""

    id: str = ""
    name: Text = field(default_factory=Text)
    waiting: Text = field(default_factory=Text)
    """The end of its arguments, which has not been passed on yet."""
    begun: bool = False


@dataclass(slots=True)
class ToolCallStream:
    """Returns the pieces of a stream's tool calls in the order of the calls: all of one, then all of the next.

    A chat stream may alternate between its calls. The pieces of the first call are passed on immediately; the others
    wait until the reply continues with something else, or ends. A call without an id gets one from the reply's id.
    """

    reply_id: object = None
    _calls: list[_Pending] = field(default_factory=list[_Pending])
    _index: dict[int | str | None, int] = field(default_factory=dict[int | str | None, int])
    _current: int = 0

    def feed(self, delta: Json) -> list[tuple[int, MessageToolCall]]:
        """Return the pieces to pass on, each with the number of its call; possibly none.

        Raises:
            CallFailed: 502, the server continued a call after its end was passed on.
        """
        for piece in objects(delta.get("tool_calls")):
            index = piece.get("index")
            number = self._index.setdefault(index if isinstance(index, (int, str)) else None, len(self._calls))
            if number == len(self._calls):
                self._calls.append(_Pending())
            call, function = self._calls[number], object_in(piece, "function")
            call.id = call.id or str(piece.get("id") or "")
            name = text_of(function.get("name"))
            if not call.name.is_just(name):  # some servers repeat it in each piece
                call.name.add(name)
            value = function.get("arguments")  # some engines return the object itself
            arguments = json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else text_of(value)
            if number < self._current and arguments.strip():
                text = f"The model server continued the tool call {shown(str(call.name))} after its end"
                raise unusable(text)
            call.waiting.add(arguments)
        return self._taken(self._current, False)

    def end(self) -> list[tuple[int, MessageToolCall]]:
        """Return the waiting pieces: all calls have ended."""
        pieces = [piece for number in range(self._current, len(self._calls)) for piece in self._taken(number, True)]
        self._current = len(self._calls)
        return pieces

    def _taken(self, number: int, at_end: bool) -> list[tuple[int, MessageToolCall]]:
        """Return the waiting pieces of one call; none before its name has arrived."""
        if number >= len(self._calls):
            return []
        call = self._calls[number]
        is_ready = bool((call.id and call.name) or call.waiting or at_end)
        if not is_ready or (call.begun and not call.waiting):
            return []
        call.id = call.id or f"call_{self.reply_id}_{number}"
        piece = MessageToolCall(call.id, str(call.name), str(call.waiting))
        call.begun, call.waiting = True, Text()
        return [(number, piece)]


# --- parts of a reply ------------------------------------------------------------------------------------------------


def thought_in(message: Json) -> str:
    """Return the model's thought in a message or a piece of one; engines use two field names."""
    return text_of(message.get("reasoning_content")) or text_of(message.get("reasoning"))


class PartWriter(StreamWriter):
    """Writes a chat stream as consecutive parts, each opened, filled and closed: thoughts, text, calls."""

    kinds: Mapping[str, str]
    """The kinds of the parts for the `thought`, the `content` and the `refusal`."""
    empty: str | None = None
    """The kind of the part of an empty reply."""

    def __init__(self, request: Json) -> None:
        self.request = request
        self.head: Json = {}
        """`id`, `created` and `model` of the reply."""
        self.usage: object = None
        self.choice: Json = {}
        """The piece with the finish reason of the reply."""
        self.part: str | None = None
        """The kind of the open part, `call` for a tool call."""
        self.said: set[str] = set()
        """Contents of the reply, of `thought`, `content`, `refusal` and `call`."""
        self.call: MessageToolCall | None = None
        """The beginning of the open tool call."""
        self._number = 0
        """Number of the open tool call."""
        self._calls = ToolCallStream()

    @abstractmethod
    def begin(self) -> bytes:
        """Return the events that begin the reply."""

    @abstractmethod
    def open(self) -> bytes:
        """Return the events that begin the part."""

    @abstractmethod
    def fill(self, text: str) -> bytes:
        """Return the events that add a text to the open part."""

    @abstractmethod
    def close(self, *, last: bool) -> bytes:
        """Return the events that end the open part."""

    @abstractmethod
    def finish(self) -> bytes:
        """Return the events that end the reply."""

    @override
    def feed(self, chunk: Json) -> bytes:
        events: list[bytes] = []
        if not self.head:
            self.head = {name: chunk.get(name) for name in ("id", "created", "model")}
            self._calls.reply_id = chunk.get("id")
            events.append(self.begin())
        if chunk.get("usage") is not None:
            self.usage = chunk["usage"]
        for choice in objects(chunk.get("choices")):
            if choice.get("index", 0) != 0:
                continue
            delta = object_in(choice, "delta")
            texts = {"thought": thought_in(delta)}
            texts.update({name: text_of(delta.get(name)) for name in ("content", "refusal")})
            for kind, text in texts.items():
                if text:
                    self.said.add(kind)
                    events += [self._in_part(self.kinds[kind]), self.fill(text)]
            events.append(self._pass_calls(self._calls.feed(delta)))
            if choice.get("finish_reason") is not None:
                self.choice = choice
        return b"".join(events)

    @override
    def end(self) -> bytes:
        events = self._pass_calls(self._calls.end())
        if self.empty is not None and not self.said:
            events += self._in_part(self.empty)
        return events + self._closed(last=True) + self.finish()

    def _pass_calls(self, pieces: list[tuple[int, MessageToolCall]]) -> bytes:
        events: list[bytes] = []
        for number, call in pieces:
            self.said.add("call")
            events.append(self._in_part("call", number, call))
            if call.arguments:
                events.append(self.fill(call.arguments))
        return b"".join(events)

    def _in_part(self, kind: str, number: int = 0, call: MessageToolCall | None = None) -> bytes:
        """Continue the open part if it is this one; otherwise close it and open this one."""
        if (self.part, self._number) == (kind, number):
            return b""
        waiting = b"" if call is not None else self._pass_calls(self._calls.end())
        closed = self._closed(last=False)
        self.part, self._number, self.call = kind, number, call
        return waiting + closed + self.open()

    def _closed(self, *, last: bool) -> bytes:
        events = b"" if self.part is None else self.close(last=last)
        self.part = self.call = None
        return events
