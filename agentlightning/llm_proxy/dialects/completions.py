"""OpenAI's text completions, with tokens that are requested and removed from the reply, and embeddings, without tokens.

vLLM and SGLang: `prompt_token_ids` and `token_ids` in each choice; log-probabilities as parallel lists.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import cast

from typing_extensions import override

from agentlightning.llm_proxy.dialects.base import Dialect, StreamReader
from agentlightning.llm_proxy.dialects.chat import DONE, ChunkReader, choices_asked, without
from agentlightning.llm_proxy.dialects.json_values import (
    Json,
    entries_of,
    json_bytes,
    object_in,
    objects,
    read_json,
)
from agentlightning.llm_proxy.dialects.token_fields import IDS, CallTokens, token_ids, tokens_in
from agentlightning.llm_proxy.sse import frame_of


class Completions(Dialect):
    """`POST /completions`."""

    route = "completions"
    kind = "completion"
    prompt_field = ("prompt", (str, list), "a string or a list")

    @override
    def prompt_of(self, request: Json) -> list[object]:
        return prompts(request["prompt"])

    @override
    def added(self, request: Json, token_options: Mapping[str, object]) -> Json:
        names = {name for name in token_options if request.get(name)}
        if request.get("logprobs") is not None:  # 0 also asks for log-probabilities: the token's own, and no others
            names.add("logprobs")
        return {name: value for name, value in token_options.items() if name not in names}

    @override
    def tokens_of(self, reply: Json, request: Json) -> CallTokens | None:
        choice = cast(Json, reply["choices"][0])
        prompt = choice.get("prompt_token_ids")
        if not prompt and (choice.get("index") == 0 or len(prompts(request.get("prompt"))) == 1):
            prompt = reply.get("prompt_token_ids")
        if prompt is None:  # the agent sent it as ids, and the engine counts the same number
            ids = token_ids(request.get("prompt"))
            prompt = ids if ids and object_in(reply, "usage").get("prompt_tokens") == len(ids) else None
        return tokens_in(choice, prompt)

    @override
    def visible(self, reply: Json, request: Json) -> Json:
        hidden = () if request.get("return_token_ids") else IDS
        return without(reply, hidden, hidden, keeps_logprobs=request.get("logprobs") is not None)

    @override
    def record_of(self, reply: Json) -> Json:
        choices = objects(reply["choices"])
        with_messages = [{**each, "message": {"role": "assistant", "content": each.get("text")}} for each in choices]
        first = choices[0].get("prompt_token_ids") if choices else None
        return {**({"prompt_token_ids": first} if first else {}), **reply, "choices": with_messages}

    @override
    def read_stream(self, request: Json) -> StreamReader:
        return ChunkReader(self, request, choices_asked(request) * max(1, len(prompts(request.get("prompt")))))

    @override
    def stream_of(self, reply: Json, request: Json) -> bytes:
        return frame_of(json_bytes(self.visible(reply, request))) + frame_of(DONE)


class Embeddings(Dialect):
    """`POST /embeddings`. Nothing is generated, so nothing is trained."""

    route = "embeddings"
    kind = "embedding"
    prompt_field = ("input", (str, list), "a string or a list")
    reply_form = "JSON with a list 'data'"
    limit_names = ()
    generates = False

    @override
    def prompt_of(self, request: Json) -> list[object]:
        return prompts(request["input"])

    @override
    def wants_stream(self, request: Json) -> bool:
        return False

    @override
    def read_reply(self, raw: bytes) -> Json | None:
        reply = read_json(raw)
        return reply if reply is not None and isinstance(reply.get("data"), list) else None

    @override
    def record_of(self, reply: Json) -> Json:
        return {**{name: value for name, value in reply.items() if name != "data"}, "choices": []}


def prompts(value: object) -> list[object]:
    """Return one user message per prompt; a prompt is a text or a list of token ids, and there may be several."""
    items = entries_of(value)
    entries = [value] if all(isinstance(entry, int) for entry in items) else items
    return [
        {"role": "user", "content": entry if isinstance(entry, str) else json.dumps(entry, ensure_ascii=False)}
        for entry in entries
    ]
