"""OpenAI chat completions, as far as the gateway must read them: what it asks for, what it finds, what it takes out.

Never tokenises: token ids and log-probabilities are the model server's own, in the spelling of its engine
(`token_fields`). In a stream vLLM gives the ids of the prompt in the first chunk, those of the completion in each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from typing_extensions import override

from agentlightning.llm_proxy.calls import CallTokens
from agentlightning.llm_proxy.dialects.base import (
    Json,
    StreamReader,
    WireDialect,
    checked,
    json_bytes,
    object_in,
    objects,
    read_json,
    read_json_object,
)
from agentlightning.llm_proxy.dialects.token_fields import IDS, tokens_in
from agentlightning.llm_proxy.replies import refuse
from agentlightning.llm_proxy.sse import data_of, frame_of

DONE = b"[DONE]"
_IN_CHOICES = {
    "token_ids": "return_token_ids",
    "prompt_token_ids": "return_prompt_token_ids",
    "meta_info": "return_meta_info",
}
"""What stands in a choice only because it was asked for, and by which field."""
_STOPPED_BY = ("stop_reason", "matched_stop")
"""What ended the reply, in the spelling of vLLM and of SGLang; beside the finish reason."""


class ChatCompletions(WireDialect):
    """`POST /chat/completions`."""

    route = "chat/completions"
    kind = "chat"

    @override
    def read_request(self, raw: bytes) -> Json:
        request = read_json_object(raw)
        checked(request, "model", str, "a string")
        checked(request, "messages", list, "a list")
        return request

    @override
    def prompt_of(self, request: Json) -> list[Any]:
        return request["messages"]

    @override
    def added(self, request: Json, wanted: Mapping[str, Any]) -> Json:
        if request.get("logprobs"):  # how many of them is the agent's choice
            wanted = {name: value for name, value in wanted.items() if name != "top_logprobs"}
        return {name: value for name, value in wanted.items() if not request.get(name)}

    @override
    def read_reply(self, raw: bytes) -> Json | None:
        reply = read_json(raw)
        return reply if reply is not None and has_choices(reply) else None

    @override
    def tokens_of(self, reply: Json, request: Json) -> CallTokens | None:
        choice = cast(Json, reply["choices"][0])
        return tokens_in(choice, reply.get("prompt_token_ids") or choice.get("prompt_token_ids"))

    @override
    def visible_reply(self, reply: Json, request: Json) -> Json:
        return visible(reply, request)

    @override
    def read_stream(self, request: Json) -> StreamReader:
        return ChatStream(request)

    @override
    def stream_of(self, reply: Json, request: Json) -> bytes:
        return b"".join(_frames_of(visible(reply, request), request))


class ChatStream(StreamReader):
    """One stream of chunks, put together as it passes."""

    def __init__(self, request: Json) -> None:
        self._request = request
        self._reply: Json = {}
        self._choices: dict[int, Json] = {}

    @property
    @override
    def complete(self) -> bool:
        finished = [choice["finish_reason"] is not None for choice in self._choices.values()]
        return len(finished) >= choices_asked(self._request) and all(finished)

    @override
    def feed(self, frame: bytes) -> bytes:
        data = data_of(frame)
        if data is None:
            return frame
        if data.strip() == DONE:
            self.ended = True
            return frame
        chunk = read_json(data)
        if chunk is None:
            text = f"The model server sent a frame that is no JSON object: {data[:200]!r}"
            raise refuse(502, text, code="upstream_unusable", state="upstream_error")
        if chunk.get("error") is not None and "choices" not in chunk:
            text = f"The model server failed in the stream: {json.dumps(chunk['error'])[:2000]}"
            raise refuse(502, text, code="upstream_error", state="upstream_error")
        self._collect(chunk)
        shown = visible(chunk, self._request)
        return frame if shown == chunk else frame_of(json_bytes(shown))

    @override
    def reply(self) -> Json | None:
        if not self._choices:
            return None
        choices = [self._choices[index] for index in sorted(self._choices)]
        return {**self._reply, "object": "chat.completion", "choices": choices}

    def _collect(self, chunk: Json) -> None:
        for name, value in chunk.items():
            if name != "choices" and value is not None:
                self._reply[name] = value
        for piece in objects(chunk.get("choices")):
            index = piece.get("index")
            if isinstance(index, int):
                empty: Json = {"index": index, "message": {"role": "assistant", "content": None}, "finish_reason": None}
                _collect_choice(self._choices.setdefault(index, empty), piece)


def _collect_choice(choice: Json, piece: Json) -> None:
    delta = piece.get("delta")
    if isinstance(delta, dict):
        _collect_delta(choice["message"], cast(Json, delta))
    choice.update({name: piece[name] for name in ("finish_reason", *_STOPPED_BY) if piece.get(name) is not None})
    if isinstance(ids := piece.get("token_ids"), list):
        choice.setdefault("token_ids", []).extend(cast("list[Any]", ids))
    logprobs = piece.get("logprobs")
    if isinstance(logprobs, dict):
        collected = choice.setdefault("logprobs", {})
        for name, entries in cast(Json, logprobs).items():
            if isinstance(entries, list):
                collected.setdefault(name, []).extend(cast("list[Any]", entries))


def _collect_delta(message: Json, delta: Json) -> None:
    for name, value in delta.items():
        if value is None:
            continue
        if name == "tool_calls":
            _collect_tool_calls(message.setdefault("tool_calls", []), objects(value))
        elif isinstance(value, str) and name != "role":
            message[name] = (message.get(name) or "") + value
        else:
            message[name] = value


def _collect_tool_calls(collected: list[Json], pieces: list[Json]) -> None:
    for piece in pieces:
        index = piece.get("index")
        known = next((call for call in collected if call["index"] == index), None)
        if known is None:
            function_so_far: Json = {"name": "", "arguments": ""}
            known = {"index": index, "id": None, "type": "function", "function": function_so_far}
            collected.append(known)
        known.update({name: piece[name] for name in ("id", "type") if piece.get(name)})
        so_far = cast(Json, known["function"])
        for name, value in object_in(piece, "function").items():
            repeated = name == "name" and value == so_far["name"]  # as some servers do in each piece
            if isinstance(value, str) and not repeated:
                so_far[name] = so_far.get(name, "") + value


def _frames_of(reply: Json, request: Json) -> list[bytes]:
    """Return a whole reply as chunks: all of it in one, then the reason of its end, then the usage if asked for."""
    usage = reply.get("usage")
    head = {name: reply[name] for name in ("id", "created", "model", "system_fingerprint") if name in reply}
    head["object"] = "chat.completion.chunk"
    chunks: list[Json] = []
    for choice in objects(reply.get("choices")):
        message = cast(Json, choice.get("message") or {})
        calls: list[Json] = [{"index": i, **call} for i, call in enumerate(objects(message.get("tool_calls")))]
        delta = {name: value for name, value in message.items() if value is not None and name != "tool_calls"}
        if calls:
            delta["tool_calls"] = calls
        last = ("finish_reason", *_STOPPED_BY)
        rest = {name: value for name, value in choice.items() if name not in ("message", *last)}
        chunks.append({**head, "choices": [{**rest, "delta": delta, "finish_reason": None}]})
        end: Json = {"index": choice.get("index", 0), "delta": {}, "finish_reason": None}
        end.update({name: choice[name] for name in last if name in choice})
        chunks.append({**head, "choices": [end]})
    if object_in(request, "stream_options").get("include_usage") and usage is not None:
        chunks.append({**head, "choices": [], "usage": usage})
    if "prompt_token_ids" in reply:
        chunks[0]["prompt_token_ids"] = reply["prompt_token_ids"]
    frames = [frame_of(json_bytes(chunk)) for chunk in chunks]
    return [*frames, frame_of(DONE)]


def choices_asked(request: Json) -> int:
    """Return how many choices a request asks for, at least one."""
    asked = request.get("n")
    return max(1, asked) if isinstance(asked, int) else 1


def has_choices(reply: Json) -> bool:
    """True for a reply with at least one choice, all of them objects."""
    choices = cast("list[Any]", found) if isinstance(found := reply.get("choices"), list) else []
    return bool(choices) and all(isinstance(choice, dict) for choice in choices)


def visible(reply: Json, request: Json) -> Json:
    """Return a reply, or a chunk of one, as it would have been without the extras that the agent did not ask for."""
    keeps_ids, keeps_logprobs = bool(request.get("return_token_ids")), bool(request.get("logprobs"))
    hidden = () if keeps_ids else IDS
    in_choices = tuple(name for name, wish in _IN_CHOICES.items() if not request.get(wish))
    if not hidden and not in_choices and keeps_logprobs:
        return reply
    shown = {name: value for name, value in reply.items() if name not in hidden}
    if isinstance(choices := reply.get("choices"), list):
        shown["choices"] = [
            _visible_choice(cast(Json, choice), in_choices, keeps_logprobs) if isinstance(choice, dict) else choice
            for choice in cast("list[Any]", choices)
        ]
    return shown


def _visible_choice(choice: Json, hidden: tuple[str, ...], keeps_logprobs: bool) -> Json:
    shown = {name: value for name, value in choice.items() if name not in hidden}
    if not keeps_logprobs and "logprobs" in shown:
        shown["logprobs"] = None
    return shown
