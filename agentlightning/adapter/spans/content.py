"""Finds the spans of model calls, and reads their text: messages, completions, request and response, images.

Attributes are flat with dotted keys (`gen_ai.prompt.0.role`, OpenLLMetry, AgentOps and the operations of this package);
they are nested here. Without such attributes, `conventions.py` reads those of other instrumentations. A part that
cannot be nested is excluded; nothing raises. Token ids are not read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, cast

from agentlightning.adapter.spans.attributes import Fields, as_dict, decoded, dicts_in, is_list
from agentlightning.adapter.spans.conventions import ADK_REQUEST, chat_messages
from agentlightning.semconv import LightningSpanAttributes
from agentlightning.types import Event

_GEN_AI: Final = "gen_ai."
_OPERATION: Final = "agentlightning.operation."
_INPUT: Final = LightningSpanAttributes.OPERATION_INPUT.value
_OUTPUT: Final = LightningSpanAttributes.OPERATION_OUTPUT.value
_REQUEST_MESSAGES: Final = frozenset(("messages",))
_TOKEN_FIELDS: Final = frozenset(("choices", "prompt_token_ids", "response_token_ids"))
_NUMERALS: Final = tuple(map(str, range(1000)))
CALL_NAME: Final = re.compile(r"openai\.chat\.completion")
"""Names of spans that are model calls, regardless of their attributes."""
_CALL_OPERATIONS: Final = frozenset(("chat", "text_completion", "generate_content"))
_CALL_TYPES: Final = frozenset(("chat", "completion"))
_INFERENCE_KIND: Final = "openinference.span.kind"


class CallContent(NamedTuple):
    """Readable content of one model call; None where the span has none."""

    prompt: object
    """Messages: a list, or a dict if the span has keys in addition to the numbered ones."""
    completion: object
    request: object
    """Parameters of the request without the messages."""
    response: object
    """Fields of the reply without choices and token ids."""


def read_content(attributes: Mapping[str, object], events: Sequence[Event] = ()) -> CallContent:
    """Return the content of one model call from the attributes of its span, or else from its events."""
    parts = nested_parts(attributes)
    inputs, output = parts.get(_INPUT) or {}, parts.get(_OUTPUT) or {}
    prompt = messages_of(parts.get("gen_ai.prompt")) or (messages_of(inputs.get("messages")) if inputs else None)
    completion = messages_of(parts.get("gen_ai.completion")) or (messages_of(output.get("choices")) if output else None)
    if prompt is None and completion is None:
        prompt, completion = (messages or None for messages in chat_messages(attributes, events))
    return CallContent(
        prompt=prompt,
        completion=completion,
        request=_without(parts.get("gen_ai.request"), _REQUEST_MESSAGES) or _without(inputs, _REQUEST_MESSAGES),
        response=_without(parts.get("gen_ai.response"), _TOKEN_FIELDS) or _without(output, _TOKEN_FIELDS),
    )


def in_order(messages: object) -> list[Fields]:
    """Return the messages of a prompt, which is a list, or a dict with keys in addition to the numbered ones."""
    if numbered := as_dict(messages):
        messages = [numbered[key] for key in sorted((key for key in numbered if key.isdecimal()), key=int)]
    return dicts_in(messages)


def image_urls(messages: object) -> list[str]:
    """Return the addresses of all images in a prompt, in order; anything else is ignored."""
    urls: list[str] = []
    for message in in_order(messages):
        content = message.get("content")
        if isinstance(content, str) and "image_url" not in content:
            continue
        parts = (part for part in dicts_in(decoded(content)) if part.get("type") == "image_url")
        url_values = (as_dict(part.get("image_url")).get("url") for part in parts)
        urls.extend(url for url in url_values if isinstance(url, str))
    return urls


def nested_parts(attributes: Mapping[str, object]) -> dict[str, Fields]:
    """Return the attributes nested, by their first parts (`gen_ai.prompt`); a bare value has the key ""."""
    parts: dict[str, Fields] = {}
    for key, value in attributes.items():
        if (place := _place(key)) is None:
            continue
        part, inner, last = place
        node: Any = parts.get(part)
        if node is None:
            node = parts[part] = {}
        for step in inner:
            below: Any = node.get(step)
            if type(below) is not dict:
                below = node[step] = {}
            node = below  # pyright: ignore[reportUnknownVariableType] -- only its kind is known
        node[last] = value
    return parts


@lru_cache(maxsize=65_536)  # the spans of a trace have the same keys in the same order: with fewer places none is hit
def _place(key: str) -> tuple[str, tuple[str, ...], str] | None:
    """Return the first parts of a key, those in the middle and the last one; None for a key that is not used."""
    root = next((root for root in (_GEN_AI, _OPERATION) if key.startswith(root)), None)
    if root is None:
        return None
    end = key.find(".", len(root))
    if end < 0:
        return key, (), ""
    *inner, last = key[end + 1 :].split(".")
    return key[:end], tuple(inner), last


def _listed(node: Fields) -> Any:
    """Return nested values in which a dict with the keys 0..n-1 is a list; changes the dicts in place."""
    for key, value in node.items():
        if type(value) is dict:
            node[key] = _listed(cast(Fields, value))
    if tuple(node) == _NUMERALS[: len(node)]:  # in order, as nearly always
        return list(node.values())
    if "0" in node and all(str(index) in node for index in range(len(node))):
        return [node[str(index)] for index in range(len(node))]
    return node


def messages_of(part: Any) -> object:
    """Return messages; a single value under the bare prefix may be text that encodes the list."""
    if not part or type(part) is not dict:
        return part or None
    if "" not in part:
        return _listed(cast(Fields, part))
    value = decoded(part[""]) if isinstance(part[""], str) else None
    return value if is_list(value) else as_dict(value) or None


def _without(part: Fields | None, names: Collection[str]) -> object:
    if not part:
        return None
    remaining = {key: value for key, value in part.items() if key and key not in names}
    return _listed(remaining) if remaining else None


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
    """Return the reply's id if OpenInference keeps the full reply as JSON text, the client's or LangChain's."""
    if attributes.get(_INFERENCE_KIND) != "LLM":
        return None
    reply = as_dict(decoded(attributes.get("output.value")))
    response_id = reply.get("id") or as_dict(reply.get("llm_output")).get("id")
    return response_id if isinstance(response_id, str) and response_id else None
