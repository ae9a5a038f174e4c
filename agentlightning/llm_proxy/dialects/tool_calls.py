"""The tool calls of a chat message for dialects in which one call follows the other, each with an id.

A chat stream tells its calls in pieces and may go back and forth between them. Here the pieces of the first call pass
at once; those of the next wait until the one before is a whole JSON object, or until the stream is at its end.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import NamedTuple

from agentlightning.llm_proxy.access.limits import shown
from agentlightning.llm_proxy.dialects.json_values import Json, object_in, objects, text_of
from agentlightning.llm_proxy.dialects.pieces import GrowingObject, Text
from agentlightning.llm_proxy.replies import unusable


class MessageToolCall(NamedTuple):
    """One tool call of a message."""

    id: str
    name: str
    arguments: str
    """JSON as the model wrote it; in a stream, a piece of it."""


def tool_calls_of(message: Json, reply_id: object) -> list[MessageToolCall]:
    """Return the tool calls of a whole message; one without an id is named after the reply."""
    found: list[MessageToolCall] = []
    for index, call in enumerate(objects(message.get("tool_calls"))):
        function = object_in(call, "function")
        name, arguments = text_of(function.get("name")), _arguments(function)
        found.append(MessageToolCall(str(call.get("id") or _made_id(reply_id, index)), name, arguments))
    return found


def _arguments(function: Json) -> str:
    """Return the arguments of a call; some engines give the object itself."""
    arguments = function.get("arguments")
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else text_of(arguments)


def _made_id(reply_id: object, index: int) -> str:
    return f"call_{reply_id}_{index}"


@dataclass(slots=True)
class _Pending:
    """What is known of one call of a stream."""

    id: str = ""
    name: Text = field(default_factory=Text)
    arguments: GrowingObject = field(default_factory=GrowingObject)
    waiting: Text = field(default_factory=Text)
    """The end of `arguments` that has not been passed on."""
    begun: bool = False


@dataclass(slots=True)
class ToolCallStream:
    """Gives the pieces of a stream's tool calls in the order of the calls: all of one, then all of the next."""

    reply_id: object = None
    _calls: list[_Pending] = field(default_factory=list[_Pending])
    _index: dict[int | str | None, int] = field(default_factory=dict[int | str | None, int])
    _current: int = 0

    def feed(self, delta: Json) -> list[tuple[int, MessageToolCall]]:
        """Return the pieces that can be passed on, each with the number of its call; may be none.

        Raises:
            CallFailed: 502, the server went on with a call of which the end has been passed on.
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
            arguments = _arguments(function)
            if number < self._current and arguments.strip():
                text = f"The model server went back to the tool call {shown(str(call.name))} after it had ended it"
                raise unusable(text)
            call.arguments.add(arguments)
            call.waiting.add(arguments)
        passed = self._taken(self._current, False)
        while self._current + 1 < len(self._calls) and self._calls[self._current].arguments.whole:
            self._current += 1
            passed += self._taken(self._current, False)
        return passed

    def end(self) -> list[tuple[int, MessageToolCall]]:
        """Return what waits: the calls so far are at their end."""
        passed = [piece for number in range(self._current, len(self._calls)) for piece in self._taken(number, True)]
        self._current = len(self._calls)
        return passed

    def _taken(self, number: int, ended: bool) -> list[tuple[int, MessageToolCall]]:
        """Return what waits of one call; nothing before its name is there."""
        if number >= len(self._calls):
            return []
        call = self._calls[number]
        known = bool((call.id and call.name) or call.waiting or ended)
        if not known or (call.begun and not call.waiting):
            return []
        call.id = call.id or _made_id(self.reply_id, number)
        piece = MessageToolCall(call.id, str(call.name), str(call.waiting))
        call.begun, call.waiting = True, Text()
        return [(number, piece)]
