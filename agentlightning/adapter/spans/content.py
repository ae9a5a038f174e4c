"""Tells which spans are model calls, and reads their text: messages, completions, request and response, images.

Attributes are flat with dotted keys (`gen_ai.prompt.0.role`, OpenLLMetry, AgentOps and the operations of this package);
they are put together again here. Where there are none, `conventions.py` reads those of other instrumentations. A part
that cannot be put together is left out; nothing raises. No token ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from agentlightning.adapter.spans.attributes import Fields, as_dict, decoded, dicts_in, is_list
from agentlightning.adapter.spans.conventions import ADK_REQUEST, chat_messages
from agentlightning.semconv import LightningSpanAttributes
from agentlightning.types import Event
from agentlightning.utils.attributes import unflatten_attributes

_GEN_AI: Final = "gen_ai."
_OPERATION: Final = "agentlightning.operation."
_INPUT: Final = LightningSpanAttributes.OPERATION_INPUT.value
_OUTPUT: Final = LightningSpanAttributes.OPERATION_OUTPUT.value
_REQUEST_MESSAGES: Final = frozenset(("messages",))
_TOKEN_FIELDS: Final = frozenset(("choices", "prompt_token_ids", "response_token_ids"))
CALL_NAME: Final = re.compile(r"openai\.chat\.completion")
"""Names of spans that are model calls, whatever their attributes say."""
_CALL_OPERATIONS: Final = frozenset(("chat", "text_completion", "generate_content"))
_CALL_TYPES: Final = frozenset(("chat", "completion"))
_INFERENCE_KIND: Final = "openinference.span.kind"

Flat = Fields


class CallContent(NamedTuple):
    """The readable side of one model call; None where the span does not tell."""

    prompt: object
    """Messages: a list, or a dict where the span has keys beside the numbered ones."""
    completion: object
    request: object
    """Parameters of the request without the messages."""
    response: object
    """Fields of the reply without choices and token ids."""


def read_content(attributes: Mapping[str, object], events: Sequence[Event] = ()) -> CallContent:
    """Return the content of one model call out of the attributes of its span, or else out of its events."""
    if (content := _plain_content(attributes)) is not None:
        return content
    groups = _group(attributes)
    inputs, output = groups.get(_INPUT, {}), groups.get(_OUTPUT, {})
    prompt = _nested(groups.get("gen_ai.prompt")) or _nested(_below(inputs, "messages"))
    completion = _nested(groups.get("gen_ai.completion")) or _nested(_below(output, "choices"))
    if prompt is None and completion is None:
        prompt, completion = (messages or None for messages in chat_messages(attributes, events))
    return CallContent(
        prompt=prompt,
        completion=completion,
        request=_without(groups.get("gen_ai.request", {}), _REQUEST_MESSAGES) or _without(inputs, _REQUEST_MESSAGES),
        response=_without(groups.get("gen_ai.response", {}), _TOKEN_FIELDS) or _without(output, _TOKEN_FIELDS),
    )


def in_order(messages: object) -> list[Fields]:
    """Return the messages of a prompt, which is a list, or a dict with keys beside the numbered ones."""
    if numbered := as_dict(messages):
        messages = [numbered[key] for key in sorted((key for key in numbered if key.isdecimal()), key=int)]
    return dicts_in(messages)


def image_urls(messages: object) -> list[str]:
    """Return the addresses of all images in a prompt, in order; anything that is no image is passed over."""
    urls: list[str] = []
    for message in in_order(messages):
        content = message.get("content")
        if isinstance(content, str) and "image_url" not in content:
            continue
        parts = (part for part in dicts_in(decoded(content)) if part.get("type") == "image_url")
        told = (as_dict(part.get("image_url")).get("url") for part in parts)
        urls.extend(url for url in told if isinstance(url, str))
    return urls


def _plain_content(attributes: Mapping[str, object]) -> CallContent | None:
    """Return the content in one pass, where each message has flat fields and comes in order; None for any other form.

    Most clients write it so, and the general way takes four times as long.
    """
    prompt: list[Flat] = []
    completion: list[Flat] = []
    request: Flat = {}
    response: Flat = {}
    for key, value in attributes.items():
        place = _plain_place(key)
        if place is None:
            continue
        part, index, name = place
        if part == "request":
            request[name] = value
        elif part == "response":
            response[name] = value
        elif part == "other":
            return None
        else:
            messages = prompt if part == "prompt" else completion
            if index == len(messages):
                messages.append({name: value})
            elif index < len(messages):
                messages[index][name] = value
            else:
                return None
    if not prompt and not completion:
        return None
    return CallContent(prompt or None, completion or None, request or None, response or None)


@lru_cache(maxsize=65_536)  # the spans of a trace have the same keys in the same order: with fewer places none is hit
def _plain_place(key: str) -> tuple[str, int, str] | None:
    """Return the part that a key is of, the number of its message and its field; None if `read_content` leaves it out.

    `other` stands for whatever has no plain place.
    """
    place = _place(key)
    if place is None:
        return None
    group, rest = place
    if group in (_INPUT, _OUTPUT):
        return "other", 0, rest
    part = group.removeprefix(_GEN_AI)
    if part in ("prompt", "completion"):
        field = _message_field(rest)
        return ("other", 0, rest) if field is None else (part, *field)
    if part not in ("request", "response") or not rest:
        return None
    head, dot, _ = rest.partition(".")
    if head in (_REQUEST_MESSAGES if part == "request" else _TOKEN_FIELDS):
        return None
    return ("other", 0, rest) if dot or rest.isdecimal() else (part, 0, rest)


def _nested(group: Flat | None) -> object:
    """Return a group as lists and dicts; a single value under the bare prefix may be text that spells the list."""
    if not group:
        return None
    if "" not in group:
        messages = _messages(group)
        return unflatten_attributes(group) if messages is None else messages
    spelt = decoded(group[""]) if isinstance(group[""], str) else None
    return spelt if is_list(spelt) else as_dict(spelt) or None


def _group(attributes: Mapping[str, object]) -> dict[str, Flat]:
    """Return the attributes by their first parts (`gen_ai.prompt`), the rest of each key as its key there."""
    groups: dict[str, Flat] = {}
    for key, value in attributes.items():
        if (place := _place(key)) is not None:
            groups.setdefault(place[0], {})[place[1]] = value
    return groups


@lru_cache(maxsize=4096)
def _place(key: str) -> tuple[str, str] | None:
    """Return the first parts of a key and its rest; None for a key that is not of interest."""
    root = next((root for root in (_GEN_AI, _OPERATION) if key.startswith(root)), None)
    if root is None:
        return None
    end = key.find(".", len(root))
    return (key, "") if end < 0 else (key[:end], key[end + 1 :])


def _messages(group: Flat) -> list[Flat] | None:
    """Return what `unflatten_attributes` would, for keys such as `0.role` in their order; None for any other keys."""
    messages: list[Flat] = []
    for key, value in group.items():
        place = _message_field(key)
        if place is None or place[0] > len(messages):
            return None
        index, name = place
        if index == len(messages):
            messages.append({name: value})
        else:
            messages[index][name] = value
    return messages


@lru_cache(maxsize=4096)
def _message_field(key: str) -> tuple[int, str] | None:
    """Return the number of a message and the name of its field; None if the key is not made of these two."""
    index, dot, name = key.partition(".")
    plain = dot and index.isdecimal() and index == str(int(index)) and "." not in name and not name.isdecimal()
    return (int(index), name) if plain else None


def _below(group: Flat, head: str) -> Flat:
    start = head + "."
    return {
        "" if key == head else key[len(start) :]: value
        for key, value in group.items()
        if key == head or key.startswith(start)
    }


def _without(group: Flat, heads: Iterable[str]) -> object:
    """Return a group nested, less some of its first parts and its bare value."""
    left = {key: value for key, value in group.items() if key and key.partition(".")[0] not in heads}
    if not any("." in key or key.isdecimal() for key in left):
        return left or None
    return unflatten_attributes(left) or None


# --- which spans are model calls --------------------------------------------------------------------------------------


def says_model_call(name: str, attributes: Mapping[str, object]) -> bool:
    """True if a span is one model call by its name or by the attributes of any convention."""
    return (
        attributes.get("gen_ai.operation.name") in _CALL_OPERATIONS
        or attributes.get("llm.request.type") in _CALL_TYPES
        or attributes.get(_INFERENCE_KIND) == "LLM"
        or ("request_data" in attributes and "gen_ai.request.model" in attributes)
        or attributes.get(ADK_REQUEST, "{}") != "{}"
        or CALL_NAME.search(name) is not None
    )


def response_id_in_output(attributes: Mapping[str, object]) -> str | None:
    """Return the reply's id where OpenInference keeps the whole reply as JSON text, the client's or LangChain's."""
    if attributes.get(_INFERENCE_KIND) != "LLM":
        return None
    reply = as_dict(decoded(attributes.get("output.value")))
    found = reply.get("id") or as_dict(reply.get("llm_output")).get("id")
    return found if isinstance(found, str) and found else None
