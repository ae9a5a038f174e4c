"""The tool calls of a chat message for dialects in which one call follows the other, each with an id.

A chat stream tells its calls in pieces and may go back and forth between them. Here the pieces of the first call pass
at once; those of the next wait until the one before is a whole JSON object, or until the stream is at its end.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agentlightning.llm_proxy.dialects.base import Json, object_in, objects
from agentlightning.llm_proxy.replies import refuse


class ToolCall(NamedTuple):
    """One tool call of a message."""

    id: str
    name: str
    arguments: str
    """JSON as the model wrote it; in a stream, a piece of it."""


def tool_calls_of(message: Json, reply_id: Any) -> list[ToolCall]:
    """Return the tool calls of a whole message; one without an id is named after the reply."""
    found: list[ToolCall] = []
    for index, call in enumerate(objects(message.get("tool_calls"))):
        function = object_in(call, "function")
        name, arguments = str(function.get("name") or ""), str(function.get("arguments") or "")
        found.append(ToolCall(str(call.get("id") or _made_id(reply_id, index)), name, arguments))
    return found


def _made_id(reply_id: Any, index: int) -> str:
    return f"call_{reply_id}_{index}"


@dataclass(slots=True)
class _Pending:
    """What is known of one call of a stream."""

    id: str = ""
    name: str = ""
    arguments: str = ""
    waiting: str = ""
    """The end of `arguments` that has not been passed on."""
    begun: bool = False

    @property
    def whole(self) -> bool:
        try:
            return isinstance(json.loads(self.arguments), dict)
        except (ValueError, RecursionError):
            return False


@dataclass(slots=True)
class ToolCallStream:
    """Gives the pieces of a stream's tool calls in the order of the calls: all of one, then all of the next."""

    reply_id: Any = None
    _calls: list[_Pending] = field(default_factory=list[_Pending])
    _index: dict[Any, int] = field(default_factory=dict[Any, int])
    _current: int = 0

    def feed(self, delta: Json) -> list[tuple[int, ToolCall]]:
        """Return the pieces that can be passed on, each with the number of its call; may be none.

        Raises:
            CallFailed: 502, the server went on with a call of which the end has been passed on.
        """
        for piece in objects(delta.get("tool_calls")):
            number = self._index.setdefault(piece.get("index"), len(self._calls))
            if number == len(self._calls):
                self._calls.append(_Pending())
            call, function = self._calls[number], object_in(piece, "function")
            call.id = call.id or str(piece.get("id") or "")
            name = str(function.get("name") or "")
            call.name += "" if name == call.name else name  # some servers repeat it in each piece
            arguments = str(function.get("arguments") or "")
            if number < self._current and arguments.strip():
                text = f"The model server went back to the tool call {call.name!r} after it had ended it"
                raise refuse(502, text, code="upstream_unusable", state="upstream_error")
            call.arguments += arguments
            call.waiting += arguments
        return self._passed()

    def end(self) -> list[tuple[int, ToolCall]]:
        """Return what waits: the calls so far are at their end."""
        passed = [piece for number in range(self._current, len(self._calls)) for piece in self._taken(number, True)]
        self._current = len(self._calls)
        return passed

    def _passed(self) -> list[tuple[int, ToolCall]]:
        passed = self._taken(self._current, False)
        while self._current + 1 < len(self._calls) and self._calls[self._current].whole:
            self._current += 1
            passed += self._taken(self._current, False)
        return passed

    def _taken(self, number: int, ended: bool) -> list[tuple[int, ToolCall]]:
        """Return what waits of one call; nothing before its name is there."""
        if number >= len(self._calls):
            return []
        call = self._calls[number]
        known = bool((call.id and call.name) or call.waiting or ended)
        if not known or (call.begun and not call.waiting):
            return []
        call.id = call.id or _made_id(self.reply_id, number)
        piece = ToolCall(call.id, call.name, call.waiting)
        call.begun, call.waiting = True, ""
        return [(number, piece)]
