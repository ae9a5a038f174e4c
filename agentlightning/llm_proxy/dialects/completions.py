"""OpenAI's text completions: passed on, with the tokens asked for and taken out again.

vLLM and SGLang: `prompt_token_ids` and `token_ids` in each choice; log-probabilities as parallel lists.
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
from agentlightning.llm_proxy.dialects.chat import DONE, choices_asked, has_choices
from agentlightning.llm_proxy.dialects.token_fields import IDS, token_ids, tokens_in
from agentlightning.llm_proxy.replies import refuse
from agentlightning.llm_proxy.sse import data_of, frame_of

_LAST_WORD = ("finish_reason", "stop_reason", "prompt_token_ids")
"""Fields of a choice of which a stream says the value, not a part of it."""


class Completions(WireDialect):
    """`POST /completions`."""

    route = "completions"
    kind = "completion"

    @override
    def read_request(self, raw: bytes) -> Json:
        request = read_json_object(raw)
        checked(request, "model", str, "a string")
        checked(request, "prompt", (str, list), "a string or a list")
        return request

    @override
    def prompt_of(self, request: Json) -> list[Any]:
        return prompts(request["prompt"])

    @override
    def added(self, request: Json, wanted: Mapping[str, Any]) -> Json:
        asked = {name for name in wanted if request.get(name)}
        if request.get("logprobs") is not None:  # 0 is a wish too: the token's own, and no others
            asked.add("logprobs")
        return {name: value for name, value in wanted.items() if name not in asked}

    @override
    def read_reply(self, raw: bytes) -> Json | None:
        reply = read_json(raw)
        return reply if reply is not None and has_choices(reply) else None

    @override
    def tokens_of(self, reply: Json, request: Json) -> CallTokens | None:
        choice = cast(Json, reply["choices"][0])
        prompt = choice.get("prompt_token_ids") or reply.get("prompt_token_ids")
        return tokens_in(choice, _ids_sent(request, reply) if prompt is None else prompt)

    @override
    def visible_reply(self, reply: Json, request: Json) -> Json:
        return _visible(reply, request)

    @override
    def record_of(self, reply: Json) -> Json:
        choices = objects(reply["choices"])
        messages = [{"role": "assistant", "content": choice.get("text")} for choice in choices]
        told = [{**choice, "message": message} for choice, message in zip(choices, messages, strict=True)]
        first = choices[0].get("prompt_token_ids") if choices else None
        return {**({"prompt_token_ids": first} if first else {}), **reply, "choices": told}

    @override
    def read_stream(self, request: Json) -> StreamReader:
        return _CompletionStream(request)

    @override
    def stream_of(self, reply: Json, request: Json) -> bytes:
        return frame_of(json_bytes(_visible(reply, request))) + frame_of(DONE)


def _ids_sent(request: Json, reply: Json) -> list[int] | None:
    """Return the prompt's ids where the agent sent the prompt as ids and the engine counts as many."""
    sent = token_ids(request.get("prompt"))
    return sent if sent and object_in(reply, "usage").get("prompt_tokens") == len(sent) else None


def prompts(given: Any) -> list[Any]:
    """Return one user message per prompt; a prompt is a text or a list of token ids, and there may be several."""
    listed = cast("list[Any]", given) if isinstance(given, list) else []
    entries: list[Any] = [given] if all(isinstance(entry, int) for entry in listed) else listed
    return [
        {"role": "user", "content": entry if isinstance(entry, str) else json.dumps(entry, ensure_ascii=False)}
        for entry in entries
    ]


class _CompletionStream(StreamReader):
    """One stream of text pieces, put together as it passes."""

    def __init__(self, request: Json) -> None:
        self._request = request
        self._reply: Json = {}
        self._choices: dict[int, Json] = {}

    @property
    @override
    def complete(self) -> bool:
        finished = [choice.get("finish_reason") is not None for choice in self._choices.values()]
        asked = choices_asked(self._request) * max(1, len(prompts(self._request.get("prompt"))))
        return len(finished) >= asked and all(finished)

    @override
    def feed(self, frame: bytes) -> bytes:
        data = data_of(frame)
        if data is None:
            return frame
        if data.strip() == DONE:
            self.ended = True
            return frame
        chunk = read_json(data)
        if chunk is None or (chunk.get("error") is not None and "choices" not in chunk):
            text = f"The model server failed in the stream: {data[:2000].decode('utf-8', 'replace')}"
            raise refuse(502, text, code="upstream_error", state="upstream_error")
        self._reply.update({name: value for name, value in chunk.items() if name != "choices" and value is not None})
        for piece in objects(chunk.get("choices")):
            if isinstance(index := piece.get("index"), int):
                _collect(self._choices.setdefault(index, {"index": index, "text": ""}), piece)
        shown = _visible(chunk, self._request)
        return frame if shown == chunk else frame_of(json_bytes(shown))

    @override
    def reply(self) -> Json | None:
        if not self._choices:
            return None
        return {**self._reply, "choices": [self._choices[index] for index in sorted(self._choices)]}


def _collect(choice: Json, piece: Json) -> None:
    choice["text"] += piece.get("text") or ""
    choice.update({name: piece[name] for name in _LAST_WORD if piece.get(name) is not None})
    if isinstance(ids := piece.get("token_ids"), list):
        choice.setdefault("token_ids", []).extend(cast("list[Any]", ids))
    for name, values in object_in(piece, "logprobs").items():
        if isinstance(values, list):
            choice.setdefault("logprobs", {}).setdefault(name, []).extend(cast("list[Any]", values))


def _visible(reply: Json, request: Json) -> Json:
    hidden = () if request.get("return_token_ids") else IDS
    keeps_logprobs = request.get("logprobs") is not None
    shown = {name: value for name, value in reply.items() if name not in hidden}
    if isinstance(reply.get("choices"), list):
        shown["choices"] = [_visible_choice(choice, hidden, keeps_logprobs) for choice in objects(reply["choices"])]
    return shown


def _visible_choice(choice: Json, hidden: tuple[str, ...], keeps_logprobs: bool) -> Json:
    shown = {name: value for name, value in choice.items() if name not in hidden}
    if not keeps_logprobs and "logprobs" in shown:
        shown["logprobs"] = None
    return shown
