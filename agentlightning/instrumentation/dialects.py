"""Requests and replies of a client library as span attributes, by route.

Each reply, also that of a stream, is first converted to a chat completion, so that adapters find every call under the
same keys. Only listed fields are read: no headers, no keys, no unknown fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, cast

from agentlightning.types import Attributes, AttributeValue

Json = dict[str, Any]
PROMPT_IDS, RESPONSE_IDS = "prompt_token_ids", "response_token_ids"
LOGPROBS = "logprobs.content"
TOKEN_FIELDS = frozenset((PROMPT_IDS, RESPONSE_IDS, LOGPROBS))
_SAMPLING: Final = ("model", "n", "temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")
_PARAMETERS: Final = (*_SAMPLING, "max_tokens", "max_completion_tokens", "max_output_tokens", "reasoning_effort")
_MESSAGE: Final = ("role", "content", "name", "tool_call_id", "reasoning_content", "refusal")


# --- the request -----------------------------------------------------------------------------------------------------


def request_attributes(dialect: Dialect, request: Mapping[str, Any], *, words: bool = True) -> Attributes:
    """Return a request as attributes of a span; without `words` neither messages nor tools."""
    result: Attributes = {
        "gen_ai.system": "openai",
        "gen_ai.operation.name": dialect.operation,
        "llm.request.type": dialect.kind,
        "llm.is_streaming": str(bool(request.get("stream"))),
    }
    for name in _PARAMETERS:
        if isinstance(value := request.get(name), (str, int, float, bool)):
            result[f"gen_ai.request.{name}"] = value
    if not words:
        return result
    for index, message in enumerate(dialect.messages(request)):
        result.update(_message_attributes(f"gen_ai.prompt.{index}", message))
    for index, tool in enumerate(entries(request.get("tools"))):
        definition = fields_of(tool)
        function = fields_of(definition.get("function")) or definition
        names = ("name", "description", "parameters")
        result.update(_texts(f"llm.request.functions.{index}", function, names))
    return result


def _chat_messages(request: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [fields_of(message) for message in entries(request.get("messages"))]


def _one_prompt(request: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    prompt: Any = request.get("prompt", request.get("input"))
    texts = entries(prompt)
    texts = texts if texts and all(isinstance(text, str) for text in texts) else [prompt]
    return [{"role": "user", "content": text} for text in texts]


def _responses_messages(request: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if request.get("instructions"):
        yield {"role": "system", "content": request["instructions"]}
    value = request.get("input")
    for item in [{"role": "user", "content": value}] if isinstance(value, str) else map(fields_of, entries(value)):
        match item.get("type", "message"):
            case "message":
                yield {"role": item.get("role"), "content": _plain(item.get("content"))}
            case "function_call":
                yield {"role": "assistant", "tool_calls": [_function_call(item)]}
            case "function_call_output":
                yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
            case _:  # reasoning, and content that only the server can read
                pass


def _plain(content: object) -> object:
    """Return parts that are all text as one text, other values unchanged."""
    parts = [fields_of(part) for part in entries(content)]
    if parts and all(isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    return "" if content == [] else content


def _function_call(item: Mapping[str, Any]) -> Json:
    return {"id": item.get("call_id"), "function": {"name": item.get("name"), "arguments": item.get("arguments")}}


# --- the reply -------------------------------------------------------------------------------------------------------


def reply_attributes(dialect: Dialect, reply: object) -> Attributes:
    """Return a complete reply (a model of the library or its JSON) as attributes of a span."""
    tokens = ReplyTokens()
    tokens.add(reply)
    return {**said_attributes(dialect.as_chat(fields_of(reply))), **tokens.attributes()}


def said_attributes(chat: Mapping[str, Any]) -> Attributes:
    """Return a chat completion as attributes of a span, without its tokens."""
    result: Attributes = {}
    reasons: list[str] = []
    for index, choice in enumerate(map(fields_of, entries(chat.get("choices")))):
        result.update(_message_attributes(f"gen_ai.completion.{index}", fields_of(choice.get("message"))))
        if isinstance(reason := choice.get("finish_reason"), str):
            result[f"gen_ai.completion.{index}.finish_reason"] = reason
            reasons.append(reason)
    if reasons:
        result["gen_ai.response.finish_reasons"] = reasons
    for name in ("id", "model"):
        if isinstance(value := chat.get(name), str):
            result[f"gen_ai.response.{name}"] = value
    usage = fields_of(chat.get("usage"))
    counts: list[Any] = [usage.get(a, usage.get(b)) for a, b in (("prompt_tokens", "input_tokens"), _ANSWERED)]
    for name, value in zip(("prompt_tokens", "completion_tokens"), counts, strict=True):
        if type(value) is int:
            result[f"gen_ai.usage.{name}"] = value
    return result


_ANSWERED: Final = ("completion_tokens", "output_tokens")


def _same(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    return reply


def _completion_as_chat(reply: Mapping[str, Any]) -> Json:
    choices = [fields_of(choice) for choice in entries(reply.get("choices"))]
    new_choices = [{**c, "message": {"role": "assistant", "content": c.get("text")}} for c in choices]
    return {**reply, "choices": new_choices}


def _response_as_chat(reply: Mapping[str, Any]) -> Json:
    output = [fields_of(item) for item in entries(reply.get("output"))]
    texts = [_plain(item.get("content")) for item in output if item.get("type") == "message"]
    calls = [_function_call(item) for item in output if item.get("type") == "function_call"]
    message: Json = {"role": "assistant", "content": "".join(text for text in texts if isinstance(text, str))}
    message |= {"tool_calls": calls} if calls else {}
    reason = {"completed": "tool_calls" if calls else "stop", "incomplete": "length"}.get(str(reply.get("status")))
    choices = [{"message": message, "finish_reason": reason}] if output else []
    return {**reply, "choices": choices}


def _nothing_said(reply: Mapping[str, Any]) -> Json:
    return {"model": reply.get("model"), "usage": reply.get("usage")}


# --- tokens of a reply ----------------------------------------------------------------------------------------------


def token_attributes(reply: object) -> Attributes:
    """Return the token attributes of a complete reply: a model of the client library or its JSON."""
    tokens = ReplyTokens()
    tokens.add(reply)
    return tokens.attributes()


class ReplyTokens:
    """Collects the tokens of a complete reply, or of the chunks of a stream."""

    def __init__(self) -> None:
        self._prompt: list[int] = []
        self._response: list[int] = []
        self._logprobs: list[object] = []

    def add(self, reply: object) -> None:
        """Add a chunk, or a complete reply."""
        fields = fields_of(reply)
        choice = fields_of(next(iter(entries(fields.get("choices"))), None))
        own = choice.get("provider_specific_fields")
        self._prompt = self._prompt or _ids(fields.get("prompt_token_ids"))
        self._response += (
            _ids(next(iter(entries(fields.get("response_token_ids"))), None))
            or _ids(choice.get("token_ids"))
            or _ids(fields_of(own).get("token_ids"))
        )
        self._logprobs += entries(fields_of(choice.get("logprobs")).get("content"))

    def attributes(self) -> Attributes:
        """Return the attributes of the tokens, without missing ones."""
        result: Attributes = {}
        if self._prompt:
            result[PROMPT_IDS] = self._prompt
        if self._response:
            result[RESPONSE_IDS] = self._response
        if self._logprobs:
            result[LOGPROBS] = json.dumps(self._logprobs, default=str)
        return result


# --- the reply as a stream -------------------------------------------------------------------------------------------


@dataclass
class ChatStream:
    """Joins the chunks of a chat completion, or of a text completion."""

    chat: Json = field(default_factory=dict[str, Any])
    choices: dict[int, Json] = field(default_factory=dict[int, Json])

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Add a chunk."""
        self.chat.update({name: chunk[name] for name in ("id", "model", "usage") if chunk.get(name)})
        for piece in map(fields_of, entries(chunk.get("choices"))):
            choice = self.choices.setdefault(piece.get("index") or 0, {"message": {"role": "assistant"}, "calls": {}})
            delta, message = fields_of(piece.get("delta")) or {"content": piece.get("text")}, choice["message"]
            for name in ("content", "reasoning_content", "refusal"):
                if isinstance(text := delta.get(name), str):
                    message[name] = message.get(name, "") + text
            for call in map(fields_of, entries(delta.get("tool_calls"))):
                self._add_call(choice["calls"], call)
            choice["finish_reason"] = piece.get("finish_reason") or choice.get("finish_reason")

    def _add_call(self, calls: dict[int, Json], call: Mapping[str, Any]) -> None:
        function = fields_of(call.get("function"))
        entry = calls.setdefault(call.get("index") or 0, {"id": None, "function": {"name": "", "arguments": ""}})
        entry["id"] = call.get("id") or entry["id"]
        entry["function"]["name"] = function.get("name") or entry["function"]["name"]
        entry["function"]["arguments"] += function.get("arguments") or ""

    def as_chat(self) -> Json:
        """Return the text received so far as a chat completion."""
        choices: list[Json] = []
        for _, choice in sorted(self.choices.items()):
            calls = [call for _, call in sorted(choice["calls"].items())]
            message = {**choice["message"], **({"tool_calls": calls} if calls else {})}
            choices.append({"message": message, "finish_reason": choice.get("finish_reason")})
        return {**self.chat, "choices": choices}


@dataclass
class ResponseStream:
    """Keeps the last complete response in the events of the Responses API."""

    response: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def add(self, event: Mapping[str, Any]) -> None:
        """Add an event."""
        self.response = fields_of(event.get("response")) or self.response

    def as_chat(self) -> Json:
        """Return the response as a chat completion."""
        return _response_as_chat(self.response)


# --- the dialects ----------------------------------------------------------------------------------------------------


class Dialect(NamedTuple):
    """One route of a client library."""

    operation: str
    kind: str
    messages: Callable[[Mapping[str, Any]], Any]
    as_chat: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    stream: Callable[[], ChatStream | ResponseStream]


_CHAT: Final = Dialect("chat", "chat", _chat_messages, _same, ChatStream)
DIALECTS: Final[Mapping[str, Dialect]] = {
    "/chat/completions": _CHAT,
    "/responses": Dialect("chat", "chat", _responses_messages, _response_as_chat, ResponseStream),
    "/completions": Dialect("text_completion", "completion", _one_prompt, _completion_as_chat, ChatStream),
    "/embeddings": Dialect("embeddings", "embedding", _one_prompt, _nothing_said, ChatStream),
}
"""Dialects by the end of the route, the longest first."""


def dialect_of(url: str) -> Dialect | None:
    """Return the dialect of a route; None for a route without a model call."""
    path = url.partition("?")[0].rstrip("/")
    return next((dialect for route, dialect in DIALECTS.items() if path.endswith(route)), None)


# --- values of the library ------------------------------------------------------------------------------------------


def fields_of(value: object) -> Mapping[str, Any]:
    """Return a JSON object, or the fields of a model, including those that the client library does not define."""
    if isinstance(value, Mapping):
        return cast(Mapping[str, Any], value)
    dump = getattr(value, "model_dump", None)
    if not callable(dump):
        return {}
    try:
        dumped = dump(mode="json", warnings=False)
    except Exception:  # a foreign model's own error: such a reply has no tokens to read
        return {}
    return cast(Mapping[str, Any], dumped) if isinstance(dumped, Mapping) else {}


def entries(value: object) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else []


def _ids(value: object) -> list[int]:
    ids = entries(value)
    return list(ids) if all(type(item) is int for item in ids) else []


# --- text ------------------------------------------------------------------------------------------------------------


def _message_attributes(key: str, message: Mapping[str, Any]) -> Iterator[tuple[str, AttributeValue]]:
    yield from _texts(key, message, _MESSAGE)
    for index, call in enumerate(map(fields_of, entries(message.get("tool_calls")))):
        function = {"id": call.get("id"), **fields_of(call.get("function"))}
        yield from _texts(f"{key}.tool_calls.{index}", function, ("id", "name", "arguments"))


def _texts(key: str, fields: Mapping[str, Any], names: tuple[str, ...]) -> Iterator[tuple[str, AttributeValue]]:
    return ((f"{key}.{name}", _text(fields[name])) for name in names if fields.get(name) is not None)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
