"""One request of the Responses dialect and what it leans on: the conversation before it, and items named by their id.

As at OpenAI, `previous_response_id` puts what was said so far before the input, without the instructions of then; an
`item_reference` stands for the item; `store: false` leaves nothing behind.
Source: https://platform.openai.com/docs/guides/conversation-state.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from agentlightning.llm_proxy.access.limits import LONGEST_NAME, MOST_ITEMS, shown
from agentlightning.llm_proxy.dialects.base import StreamWriter
from agentlightning.llm_proxy.dialects.json_values import (
    Json,
    entries_of,
    expanded_bytes,
    is_object,
    json_bytes,
    objects,
)
from agentlightning.llm_proxy.dialects.translation import as_text, refuse_unknown
from agentlightning.llm_proxy.off_loop import LARGE_BYTES, OffLoop
from agentlightning.llm_proxy.replies import CallFailed, busy
from agentlightning.llm_proxy.responses_state.memory import AttemptName, Item, ResponseMemory, StoredResponse
from agentlightning.utils.http.byte_budget import Hold
from agentlightning.utils.id import generate_id

NOT_REMEMBERED = (
    "This gateway remembers the responses of an attempt in memory only: what was made with 'store' false, for another "
    "attempt, before the gateway was restarted, or so long ago that it went beyond GatewayLimits.remembered_responses "
    "or remembered_bytes, is not known. Send the items of the conversation again in 'input'"
)
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


@dataclass(slots=True)
class Turn:
    """One request, its references found. Begun on the serving loop; the rest is done wherever there is time."""

    attempt: AttemptName
    request: Json
    pieces: list[Item | Json] | None
    """The whole input where a part of it was remembered; None where the request says all itself."""
    stores: bool
    size: int
    """Bytes of what was remembered."""
    name: str | None = None
    """The id of the response, once it is known."""

    def expanded(self) -> Json:
        """Return the request with everything that is said in its `input`."""
        if self.pieces is None:
            return self.request
        items = [json.loads(piece.raw) if isinstance(piece, Item) else piece for piece in self.pieces]
        return {**self.request, "input": items}

    async def hold_value(self, hold: Hold, off_loop: OffLoop) -> None:
        """Reserve the bytes that what was remembered takes, decoded too where it is large.

        Raises:
            CallFailed: 429, the attempt or the process holds too many bytes.
        """
        size = self.size
        if size >= LARGE_BYTES:
            size += await off_loop.run(size, self._expanded_bytes)
        with busy():
            hold.add_value(size)

    def _expanded_bytes(self) -> int:
        return sum(expanded_bytes(piece.raw) for piece in self.pieces or () if isinstance(piece, Item))

    def to_remember(self, response: Json) -> StoredResponse:
        """Return what is remembered of the response."""
        body = json_bytes({name: value for name, value in response.items() if name != "output"})
        given = self.request["input"] if self.pieces is None else self.pieces
        said: Sequence[Item | Json] = [_message(given)] if isinstance(given, str) else given
        context = tuple(piece if isinstance(piece, Item) else _item(piece) for piece in said)
        output = tuple(_item(item) for item in objects(response.get("output")))
        return StoredResponse(self.attempt, response["id"], body, context, output)

    def named(self, memory: ResponseMemory, upstream_id: object) -> str:
        """Return the id of the response: the model server's where that is one and no other response has it."""
        if self.name is None:
            fits = isinstance(upstream_id, str) and _NAME.fullmatch(upstream_id) is not None
            name = str(upstream_id) if fits else f"resp_{generate_id(48)}"
            while self.stores and not memory.reserve(self.attempt, name):
                name = f"resp_{generate_id(48)}"
            self.name = name
        return self.name

    def ended(self, memory: ResponseMemory, remembered: StoredResponse | None) -> None:
        """Give up the id that was kept for the response, and remember the response if there is one."""
        if self.stores and self.name is not None:  # else the id may be kept for another call
            memory.release(self.attempt, self.name)
        if remembered is not None:
            memory.add(remembered)


def begin(memory: ResponseMemory, attempt: AttemptName, request: Json, most_bytes: int) -> Turn:
    """Return the turn of a request.

    Raises:
        CallFailed: 400, an id is none, the response is not remembered, an item is there twice; 404, the item is not
            remembered; 413, together they are larger than `most_bytes`.
    """
    pieces: list[Item | Json] = []
    leans = request.get("previous_response_id") is not None
    if leans:
        pieces += _history(memory, attempt, request)
    told = {piece.item_id for piece in pieces if isinstance(piece, Item)}
    given = request["input"]
    for index, entry in enumerate([_message(given)] if isinstance(given, str) else entries_of(given)):
        place = f"input[{index}]"
        if is_reference(entry):
            refuse_unknown(entry, ("type", "id"), f"{place}.")
            leans = True
            entry = _referred(memory, attempt, as_text(entry.get("id"), f"{place}.id"))
        name = entry.item_id if isinstance(entry, Item) else entry.get("id") if is_object(entry) else None
        if isinstance(name, str) and name in told:
            text = f"Duplicate item found with id {shown(name)} in {place}: it came with the previous response already"
            raise CallFailed(400, f"{text}. Remove it from your input and try again.", param="input")
        pieces.append(entry)
    size = sum(len(piece.raw) for piece in pieces if isinstance(piece, Item))
    if size > most_bytes:
        text = f"The conversation holds {size} bytes; the gateway's limit of a request is {most_bytes}"
        raise CallFailed(413, text, code="body_too_large")
    if len(pieces) > MOST_ITEMS:
        text = f"The conversation holds {len(pieces)} items; at most {MOST_ITEMS} are taken"
        raise CallFailed(400, text, param="input", code="too_many_values")
    return Turn(attempt, request, pieces if leans else None, request.get("store") is not False, size)


def is_reference(entry: object) -> bool:
    """True for an item that stands for another one; its type may be left out."""
    return is_object(entry) and (
        entry.get("type") == "item_reference" or (entry.get("type") is None and "id" in entry and "role" not in entry)
    )


def _history(memory: ResponseMemory, attempt: AttemptName, request: Json) -> Sequence[Item]:
    name = as_text(request["previous_response_id"], "previous_response_id")
    previous = memory.response(attempt, name)
    if previous is None:
        text = f"Previous response with id {shown(name)} not found ('previous_response_id'). {NOT_REMEMBERED}"
        raise CallFailed(400, text, param="previous_response_id", code="previous_response_not_found")
    return list(previous.items)


def _referred(memory: ResponseMemory, attempt: AttemptName, name: str) -> Item:
    item = memory.item(attempt, name)
    if item is None:
        raise CallFailed(404, f"Item with id {shown(name)} not found. {NOT_REMEMBERED}", param="input")
    return item


def _message(text: str) -> Json:
    return {"type": "message", "role": "user", "content": text}


def _item(fields: Json) -> Item:
    """Return an item to remember; one without an id has one made of what it says."""
    raw, name = json_bytes(fields), fields.get("id")
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        prefix = _PREFIXES.get(str(fields.get("type") or "message"), "item")
        name = f"{prefix}_{hashlib.sha256(raw).hexdigest()[:48]}"
    return Item(name, raw)


class NamedStream(StreamWriter):
    """Writes a response whose id is not in every case the model server's."""

    def __init__(self, writer: StreamWriter, turn: Turn, memory: ResponseMemory) -> None:
        self._writer, self._turn, self._memory = writer, turn, memory

    @override
    def feed(self, chunk: Json) -> bytes:
        return self._writer.feed({**chunk, "id": self._turn.named(self._memory, chunk.get("id"))})

    @override
    def end(self) -> bytes:
        events = self._writer.end()
        self.reply = self._writer.reply
        return events
