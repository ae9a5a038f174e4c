"""Asking for remembered responses: `GET` and `DELETE /responses/{id}`, its `input_items`, and `cancel`.

Source: https://platform.openai.com/docs/api-reference/responses/get and the pages beside it.
"""

from __future__ import annotations

import json
from urllib.parse import parse_qs

from agentlightning.llm_proxy.access.limits import shown
from agentlightning.llm_proxy.dialects.json_values import Json
from agentlightning.llm_proxy.replies import CallFailed, JsonReply, json_reply
from agentlightning.llm_proxy.responses_state.memory import AttemptName, Item, ResponseMemory, StoredResponse
from agentlightning.llm_proxy.responses_state.turns import NOT_REMEMBERED

_MOST_LISTED, _LISTED = 100, 20


def found(memory: ResponseMemory, attempt: AttemptName, response_id: str) -> StoredResponse:
    """Return a response that is remembered for the attempt.

    Raises:
        CallFailed: 404, it is not.
    """
    response = memory.response(attempt, response_id)
    if response is None:
        text = f"Response with id {shown(response_id)} not found. {NOT_REMEMBERED}"
        raise CallFailed(404, f"{text}. Responses of a model server that has this API itself are kept there")
    return response


def retrieved(response: StoredResponse, query: bytes) -> JsonReply:
    """Return a response.

    Raises:
        CallFailed: 400, it is asked for as a stream.
    """
    if _query(query).get("stream") == "true":
        text = "'stream' cannot be served: only a response that is made in the background can be streamed again"
        raise CallFailed(400, text, param="stream", code="unsupported_value")
    return json_reply({**json.loads(response.body), "output": [json.loads(item.raw) for item in response.output]})


def deleted(memory: ResponseMemory, response: StoredResponse) -> JsonReply:
    """Forget a response; those that went on from it stay."""
    memory.delete(response.attempt, response.response_id)
    return json_reply({"id": response.response_id, "object": "response", "deleted": True})


def not_cancelled() -> CallFailed:
    """Return the refusal to cancel a response, as each is complete that has an id."""
    return CallFailed(400, "Cannot cancel a synchronous response: only one that is made in the background")


def input_items(response: StoredResponse, query: bytes) -> JsonReply:
    """Return a page of what was said before a response, the newest first unless `order` is `asc`.

    Raises:
        CallFailed: 400 that names the parameter that is wrong.
    """
    items, asked = list(response.context), _query(query)
    limit, order, after = asked.get("limit", str(_LISTED)), asked.get("order", "desc"), asked.get("after")
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
        given = parse_qs(query.decode("latin-1"), max_num_fields=100)
    except ValueError:
        raise CallFailed(400, "The query of the URL has too many parameters") from None
    return {name: values[-1] for name, values in given.items()}


def _listed(item: Item) -> Json:
    """Return an item as a list shows it: with its id, and texts as parts."""
    fields: Json = {**json.loads(item.raw), "id": item.item_id}
    if fields.get("type") in (None, "message"):
        fields["type"] = "message"
        fields.setdefault("status", "completed")
        if isinstance(text := fields.get("content"), str):
            said = fields.get("role") == "assistant"
            part: Json = {"type": "output_text", "annotations": []} if said else {"type": "input_text"}
            fields["content"] = [{**part, "text": text}]
    return fields
