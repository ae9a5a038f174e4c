"""The responses and items that attempts may refer to by their id: in memory, limited in size, never on disk.

Each attempt has its own memory, so an id of another attempt is always unknown. Items are kept as JSON and shared
between the responses of an attempt: a conversation that is sent in full with each call is stored once. If the limits
are exceeded, the least recently used response is deleted first.

As at OpenAI, `previous_response_id` puts the earlier conversation before the input, without its instructions; an
`item_reference` is replaced by the item; with `store: false` nothing is stored. Sources: guides/conversation-state and
api-reference/responses/get at https://platform.openai.com/docs/.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qs

from agentlightning.llm_proxy.access.limits import LONGEST_NAME, MOST_ITEMS, GatewayLimits, shown
from agentlightning.llm_proxy.dialects.json_values import (
    Json,
    entries_of,
    expanded_bytes,
    fields_of,
    is_object,
    json_bytes,
    objects,
)
from agentlightning.llm_proxy.dialects.translation import as_text, refuse_unknown, text_in
from agentlightning.llm_proxy.off_loop import LARGE_BYTES, OffLoop
from agentlightning.llm_proxy.replies import CallFailed, JsonReply, busy, json_reply
from agentlightning.utils.http.byte_budget import Hold
from agentlightning.utils.id import generate_id

logger = logging.getLogger(__name__)

AttemptName = tuple[str, str]
"""Ids of the rollout and the attempt."""
_ITEM, _RESPONSE, _PLACE = 256, 512, 8
"""Bytes of an item, a response and a reference to an item, in addition to their JSON."""
_NOT_REMEMBERED = (
    "The gateway keeps the responses of an attempt in memory only. It does not have responses that were made with "
    "'store' false, for another attempt or before a restart, or that were deleted because of "
    "GatewayLimits.remembered_responses or remembered_bytes. Send the items of the conversation in 'input'"
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
_MOST_LISTED, _LISTED = 100, 20


@dataclass(slots=True, eq=False)
class Item:
    """One item of a conversation. Immutable, except for its number of references from stored responses."""

    item_id: str
    raw: bytes
    """The item as JSON."""
    uses: int = 0


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response with the conversation before it, so that it can be continued after other responses are deleted."""

    attempt: AttemptName
    response_id: str
    body: bytes
    """JSON of the response without its output."""
    context: tuple[Item, ...]
    """The complete input of the call: the earlier conversation, then the items of the request."""
    output: tuple[Item, ...]

    @property
    def items(self) -> Iterator[Item]:
        yield from self.context
        yield from self.output

    @property
    def own_bytes(self) -> int:
        """Bytes of the response without its items."""
        return _RESPONSE + len(self.body) + _PLACE * (len(self.context) + len(self.output))

    @property
    def all_bytes(self) -> int:
        """Bytes of the response with its items, as if it shared none."""
        return self.own_bytes + sum(len(item.raw) for item in self.items)


@dataclass(slots=True)
class _AttemptMemory:
    """Responses and items that one attempt may refer to."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict[str, StoredResponse])
    """Responses by their id; the last used one is at the end."""
    by_raw: dict[bytes, Item] = field(default_factory=dict[bytes, Item])
    by_id: dict[str, Item] = field(default_factory=dict[str, Item])
    """Items by their id; the first one with an id is kept."""
    size: int = 0

    def add(self, response: StoredResponse) -> None:
        shared = [self.by_raw.setdefault(item.raw, item) for item in response.items]
        for item in shared:
            if not item.uses:
                self.size += _ITEM + len(item.raw)
                self.by_id.setdefault(item.item_id, item)
            item.uses += 1
        context_length = len(response.context)
        parts = (tuple(shared[:context_length]), tuple(shared[context_length:]))
        name = response.response_id
        self.responses[name] = StoredResponse(response.attempt, name, response.body, *parts)
        self.size += response.own_bytes

    def drop(self, response_id: str) -> None:
        response = self.responses.pop(response_id)
        self.size -= response.own_bytes
        for item in response.items:
            item.uses -= 1
            if not item.uses:
                self.size -= _ITEM + len(item.raw)
                del self.by_raw[item.raw]
                if self.by_id.get(item.item_id) is item:
                    del self.by_id[item.item_id]


class ResponseMemory:
    """Stores responses until the gateway ends. Owned by the serving loop."""

    def __init__(self, limits: GatewayLimits) -> None:
        self._limits = limits
        self._attempts: OrderedDict[AttemptName, _AttemptMemory] = OrderedDict()
        """Memory of each attempt; the last used one is at the end."""
        self._reserved: set[tuple[AttemptName, str]] = set()
        """Ids of responses in progress."""
        self.size = 0
        """Stored bytes of all attempts."""

    def response(self, attempt: AttemptName, response_id: str) -> StoredResponse | None:
        """Return a response of this attempt; None if it is not stored."""
        memory = self._of(attempt)
        if memory is None or response_id not in memory.responses:
            return None
        memory.responses.move_to_end(response_id)
        return memory.responses[response_id]

    def item(self, attempt: AttemptName, item_id: str) -> Item | None:
        """Return an item of this attempt; None if it is not stored."""
        memory = self._of(attempt)
        return None if memory is None else memory.by_id.get(item_id)

    def reserve(self, attempt: AttemptName, response_id: str) -> bool:
        """Reserve an id for a response in progress; False if the attempt already has that id."""
        memory = self._attempts.get(attempt)
        if (attempt, response_id) in self._reserved or (memory is not None and response_id in memory.responses):
            return False
        self._reserved.add((attempt, response_id))
        return True

    def release(self, attempt: AttemptName, response_id: str) -> None:
        """Release a reserved id."""
        self._reserved.discard((attempt, response_id))

    def add(self, response: StoredResponse) -> None:
        """Store a response, and delete others if that exceeds the limits."""
        attempt, limits = response.attempt, self._limits
        memory = self._attempts.setdefault(attempt, _AttemptMemory())
        self._attempts.move_to_end(attempt)
        before = memory.size
        memory.add(response)
        self.size += memory.size - before
        while len(memory.responses) > limits.remembered_responses or memory.size > limits.remembered_bytes_per_attempt:
            self._drop(attempt, next(iter(memory.responses)))
        while self.size > limits.remembered_bytes:
            silent, memory = next(iter(self._attempts.items()))
            self._drop(silent, next(iter(memory.responses)))
        if attempt not in self._attempts:
            logger.warning("attempt %s: a response beyond GatewayLimits.remembered_bytes is not stored", attempt[1])

    def delete(self, attempt: AttemptName, response_id: str) -> bool:
        """Delete a response; its items are kept as long as others refer to them. False if it is not stored."""
        memory = self._of(attempt)
        if memory is None or response_id not in memory.responses:
            return False
        self._drop(attempt, response_id)
        return True

    def _drop(self, attempt: AttemptName, response_id: str) -> None:
        memory = self._attempts[attempt]
        before = memory.size
        memory.drop(response_id)
        self.size += memory.size - before
        if not memory.responses:
            del self._attempts[attempt]

    def _of(self, attempt: AttemptName) -> _AttemptMemory | None:
        if attempt in self._attempts:
            self._attempts.move_to_end(attempt)
        return self._attempts.get(attempt)


# --- a request and its references ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Turn:
    """One request with its references resolved. Begun on the serving loop; the rest may run on any thread."""

    attempt: AttemptName
    request: Json
    pieces: list[Item | Json] | None
    """The complete input if a part of it was stored; None if the request is complete."""
    stores: bool
    size: int
    """Bytes of the stored part."""
    name: str | None = None
    """The id of the response, once it is set."""

    def expanded(self) -> Json:
        """Return the request with the complete conversation in its `input`."""
        if self.pieces is None:
            return self.request
        items = [json.loads(piece.raw) if isinstance(piece, Item) else piece for piece in self.pieces]
        return {**self.request, "input": items}

    async def hold_value(self, hold: Hold, off_loop: OffLoop) -> None:
        """Reserve the bytes of the stored part, and those of its decoded form if it is large.

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
        """Return the response in the form in which it is stored."""
        body = json_bytes({name: value for name, value in response.items() if name != "output"})
        value = self.request["input"] if self.pieces is None else self.pieces
        items: Sequence[Item | Json] = [_message(value)] if isinstance(value, str) else value
        context = tuple(piece if isinstance(piece, Item) else _item(piece) for piece in items)
        output = tuple(_item(item) for item in objects(response.get("output")))
        return StoredResponse(self.attempt, response["id"], body, context, output)

    def named(self, memory: ResponseMemory, upstream_id: object) -> str:
        """Return the id of the response: the model server's, if it is valid and not used by another response."""
        if self.name is None:
            fits = isinstance(upstream_id, str) and _NAME.fullmatch(upstream_id) is not None
            name = str(upstream_id) if fits else f"resp_{generate_id(48)}"
            while self.stores and not memory.reserve(self.attempt, name):
                name = f"resp_{generate_id(48)}"
            self.name = name
        return self.name

    def ended(self, memory: ResponseMemory, remembered: StoredResponse | None) -> None:
        """Release the id that was reserved for the response, and store the response if there is one."""
        if self.stores and self.name is not None:  # else the id may be reserved for another call
            memory.release(self.attempt, self.name)
        if remembered is not None:
            memory.add(remembered)


def begin(memory: ResponseMemory, attempt: AttemptName, request: Json, most_bytes: int) -> Turn:
    """Return the turn of a request.

    Raises:
        CallFailed: 400, an id is invalid, the response is not stored, or an item occurs twice; 404, the item is not
            stored; 413, together they are larger than `most_bytes`.
    """
    pieces: list[Item | Json] = []
    leans = request.get("previous_response_id") is not None
    if leans:
        name = as_text(request["previous_response_id"], "previous_response_id")
        if (previous := memory.response(attempt, name)) is None:
            text = f"Previous response with id {shown(name)} not found ('previous_response_id'). {_NOT_REMEMBERED}"
            raise CallFailed(400, text, param="previous_response_id", code="previous_response_not_found")
        pieces += previous.items
    item_ids = {piece.item_id for piece in pieces if isinstance(piece, Item)}
    value = request["input"]
    for index, entry in enumerate([_message(value)] if isinstance(value, str) else entries_of(value)):
        place = f"input[{index}]"
        if _is_reference(entry):
            refuse_unknown(entry, ("type", "id"), f"{place}.")
            leans, name = True, text_in(entry, "id", place)
            if (entry := memory.item(attempt, name)) is None:
                raise CallFailed(404, f"Item with id {shown(name)} not found. {_NOT_REMEMBERED}", param="input")
        name = entry.item_id if isinstance(entry, Item) else fields_of(entry).get("id")
        if isinstance(name, str) and name in item_ids:
            text = f"Duplicate item found with id {shown(name)} in {place}: the previous response already contains it"
            raise CallFailed(400, f"{text}. Remove it from your input and try again.", param="input")
        pieces.append(entry)
    size = sum(len(piece.raw) for piece in pieces if isinstance(piece, Item))
    if size > most_bytes:
        text = f"The conversation has {size} bytes; the gateway's limit for a request is {most_bytes}"
        raise CallFailed(413, text, code="body_too_large")
    if len(pieces) > MOST_ITEMS:
        text = f"The conversation has {len(pieces)} items; the limit is {MOST_ITEMS}"
        raise CallFailed(400, text, param="input", code="too_many_values")
    return Turn(attempt, request, pieces if leans else None, request.get("store") is not False, size)


def _is_reference(entry: object) -> bool:
    """True for an item that refers to another one; its type may be missing."""
    return is_object(entry) and (
        entry.get("type") == "item_reference" or (entry.get("type") is None and "id" in entry and "role" not in entry)
    )


def _message(text: str) -> Json:
    return {"type": "message", "role": "user", "content": text}


def _item(fields: Json) -> Item:
    """Return an item to store; without an id, it gets one that is derived from its contents."""
    raw, name = json_bytes(fields), fields.get("id")
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        prefix = _PREFIXES.get(str(fields.get("type") or "message"), "item")
        name = f"{prefix}_{hashlib.sha256(raw).hexdigest()[:48]}"
    return Item(name, raw)


# --- requests for remembered responses -------------------------------------------------------------------------------


def remembered(memory: ResponseMemory, attempt: AttemptName, response_id: str, method: str) -> StoredResponse:
    """Return a stored response of the attempt; `POST` requests its cancellation.

    Raises:
        CallFailed: 404, it is not stored; 400, it cannot be cancelled, because responses with an id are complete.
    """
    response = memory.response(attempt, response_id)
    if response is None:
        text = f"Response with id {shown(response_id)} not found. {_NOT_REMEMBERED}"
        raise CallFailed(404, f"{text}. Responses of a model server with this API are stored by that server")
    if method == "POST":
        raise CallFailed(400, "Cannot cancel a synchronous response; only background responses can be cancelled")
    return response


def retrieved(response: StoredResponse, query: bytes) -> JsonReply:
    """Return a response.

    Raises:
        CallFailed: 400, the request is for a stream.
    """
    if _query(query).get("stream") == "true":
        text = "'stream' is not supported: only background responses can be streamed again"
        raise CallFailed(400, text, param="stream", code="unsupported_value")
    return json_reply({**json.loads(response.body), "output": [json.loads(item.raw) for item in response.output]})


def deleted(memory: ResponseMemory, response: StoredResponse) -> JsonReply:
    """Delete a response; responses that continue it are kept."""
    memory.delete(response.attempt, response.response_id)
    return json_reply({"id": response.response_id, "object": "response", "deleted": True})


def input_items(response: StoredResponse, query: bytes) -> JsonReply:
    """Return a page of the conversation before a response, the newest first unless `order` is `asc`.

    Raises:
        CallFailed: 400, a parameter is invalid; names it.
    """
    items, parameters = list(response.context), _query(query)
    limit, order, after = (
        parameters.get("limit", str(_LISTED)),
        parameters.get("order", "desc"),
        parameters.get("after"),
    )
    if not limit.isdecimal() or len(limit) > 9 or not 1 <= int(limit) <= _MOST_LISTED:
        text = f"'limit' must be a number from 1 to {_MOST_LISTED}; got {shown(limit)}"
        raise CallFailed(400, text, param="limit", code="invalid_value")
    if order not in ("asc", "desc"):
        text = f"'order' must be 'asc' or 'desc'; got {shown(order)}"
        raise CallFailed(400, text, param="order", code="invalid_value")
    if order == "desc":
        items.reverse()
    if after is not None:
        place = next((place for place, item in enumerate(items) if item.item_id == after), None)
        if place is None:
            raise CallFailed(400, f"'after' must be an item of the response; got {shown(after)}", param="after")
        items = items[place + 1 :]
    page = items[: int(limit)]
    ends = {"first_id": page[0].item_id, "last_id": page[-1].item_id} if page else {"first_id": None, "last_id": None}
    more = len(items) > len(page)
    return json_reply({"object": "list", "data": [_listed(item) for item in page], "has_more": more, **ends})


def _query(query: bytes) -> dict[str, str]:
    """Return the parameters of a query, the last of each name."""
    try:
        parameters = parse_qs(query.decode("latin-1"), max_num_fields=100)
    except ValueError:
        raise CallFailed(400, "The query of the URL has too many parameters") from None
    return {name: values[-1] for name, values in parameters.items()}


def _listed(item: Item) -> Json:
    """Return an item in the form of a list: with its id, and texts as parts."""
    fields: Json = {**json.loads(item.raw), "id": item.item_id}
    if fields.get("type") in (None, "message"):
        fields["type"] = "message"
        fields.setdefault("status", "completed")
        if isinstance(text := fields.get("content"), str):
            is_assistant = fields.get("role") == "assistant"
            part: Json = {"type": "output_text", "annotations": []} if is_assistant else {"type": "input_text"}
            fields["content"] = [{**part, "text": text}]
    return fields
