"""Small servers that reply like vLLM, SGLang, llama.cpp's server and a provider, each in its own spelling of tokens.

Written from the engines' request and reply models, not with the gateway's own code. A token is a word; the prompt of a
chat is its messages' words with a word for each role.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.stubs.model_server import encode, logprobs_of

Json = dict[str, Any]
ANSWER = "six times seven is 42"
PROMPT = [11, 12, 13]
"""Ids of every prompt."""


def _content_logprobs(**extra: list[Any]) -> Json:
    """The entries of chat log-probabilities; `extra` adds a field to each."""
    ids = encode(ANSWER)
    pairs = zip(ANSWER.split(), logprobs_of(ids), strict=True)
    entries: list[Json] = [
        {"token": word, "logprob": value, "bytes": None, "top_logprobs": []} for word, value in pairs
    ]
    for name, values in extra.items():
        for entry, value in zip(entries, values, strict=True):
            entry[name] = value
    return {"content": entries}


def _parallel_logprobs() -> Json:
    return {
        "tokens": ANSWER.split(),
        "token_logprobs": logprobs_of(encode(ANSWER)),
        "top_logprobs": [],
        "text_offset": [],
    }


def _reply(request: Json, choice: Json, kind: str, **beside: Any) -> Json:
    count = len(encode(ANSWER))
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": count, "total_tokens": len(PROMPT) + count}
    message = {"message": {"role": "assistant", "content": ANSWER}} if kind == "chat.completion" else {"text": ANSWER}
    whole = {"index": 0, **message, "finish_reason": "stop", **choice}
    return {
        "id": "r-1",
        "object": kind,
        "created": 1,
        "model": request["model"],
        "choices": [whole],
        "usage": usage,
        **beside,
    }


class Refused(Exception):
    """The engine answers 400 with this text."""


def vllm_chat(request: Json) -> Json:
    ids = bool(request.get("return_token_ids"))
    choice: Json = {"logprobs": _content_logprobs() if request.get("logprobs") else None}
    choice |= {"token_ids": encode(ANSWER) if ids else None, "stop_reason": None}
    return _reply(request, choice, "chat.completion", prompt_token_ids=PROMPT if ids else None)


def vllm_text(request: Json) -> Json:
    ids = bool(request.get("return_token_ids"))
    choice: Json = {"logprobs": _parallel_logprobs() if request.get("logprobs") is not None else None}
    choice |= {"token_ids": encode(ANSWER) if ids else None, "prompt_token_ids": PROMPT if ids else None}
    return _reply(request, choice, "text_completion")


def sglang_chat(request: Json) -> Json:
    """SGLang 0.5.13: no `token_ids` in chat yet; nothing of tokens in streams."""
    names = [name for name in ("return_prompt_token_ids", "return_meta_info") if request.get(name)]
    if request.get("stream") and names:
        raise Refused(
            f"{names[0]} is not supported with streaming. Please set stream=false when using {names[0]}=true."
        )
    choice: Json = {"logprobs": _content_logprobs() if request.get("logprobs") else None, "matched_stop": 7}
    if request.get("return_prompt_token_ids"):
        choice["prompt_token_ids"] = PROMPT
    if request.get("return_meta_info"):
        triples = zip(logprobs_of(encode(ANSWER)), encode(ANSWER), strict=True)
        choice["meta_info"] = {"id": "x", "output_token_logprobs": [[value, token, None] for value, token in triples]}
    return _reply(request, choice, "chat.completion", metadata={"weight_version": "default"})


def llama_chat(request: Json) -> Json:
    choice: Json = {}
    if request.get("logprobs"):
        assert request.get("top_logprobs", 20) < 20, "without a number it gives twenty alternatives of each token"
        choice["logprobs"] = _content_logprobs(id=encode(ANSWER))
    return _reply(request, choice, "chat.completion", timings={"prompt_n": 3})


def llama_text(request: Json) -> Json:
    choice: Json = {"logprobs": _content_logprobs(id=encode(ANSWER)) if request.get("logprobs") else None}
    return _reply(request, choice, "text_completion")


def provider_chat(request: Json) -> Json:
    unknown = [name for name in request if name.startswith("return_")]
    if unknown:
        raise Refused(f"Unrecognized request argument supplied: {unknown[0]}")
    return _reply(request, {"logprobs": None}, "chat.completion")


SPEECH: dict[str, tuple[str, Callable[[Json], Json], Callable[[Json], Json]]] = {
    "vllm": ("vllm", vllm_chat, vllm_text),
    "sglang": ("sglang", sglang_chat, vllm_text),
    "llama.cpp": ("llamacpp", llama_chat, llama_text),
    "agentlightning": ("agentlightning", vllm_chat, vllm_text),
    "openai": ("openai", provider_chat, provider_chat),
    "unknown": ("somebody", vllm_chat, vllm_text),
}
"""For each engine: the owner of its models, and its replies in chat and in text completions."""


class StubEngine:
    """One engine behind a socket."""

    def __init__(self, speech: str, *, lists_models: bool = True) -> None:
        self.owner, self.chat, self.text = SPEECH[speech]
        self.lists_models = lists_models
        self.asked: list[Json] = []
        """The bodies of the calls."""
        self.base_url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[StubEngine, None]:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._text)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        try:
            yield self
        finally:
            await runner.cleanup()

    def entry(self, **parameters: Any) -> Any:
        parameters = {"model": "m", "api_base": self.base_url, **parameters}
        return {"model_name": "policy", "litellm_params": parameters}

    async def _models(self, request: web.Request) -> web.Response:
        if not self.lists_models:
            raise web.HTTPNotFound
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": self.owner}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self.chat)

    async def _text(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self.text)

    async def _answer(self, request: web.Request, speak: Callable[[Json], Json]) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        try:
            reply = speak(body)
        except Refused as refused:
            return web.json_response({"object": "error", "message": str(refused), "code": 400}, status=400)
        if not body.get("stream"):
            return web.json_response(reply)
        return await self._stream(request, reply)

    async def _stream(self, request: web.Request, reply: Json) -> web.StreamResponse:
        """One chunk with everything, one with the end."""
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        whole = dict(reply["choices"][0])
        delta = whole.pop("message", None)
        first = {**whole, "finish_reason": None, **({"delta": delta} if delta else {})}
        last: Json = {"index": 0, "finish_reason": "stop", **({"delta": {}} if delta else {"text": ""})}
        head = {name: value for name, value in reply.items() if name not in ("choices", "usage", "object")}
        for choice in (first, last):
            await stream.write(b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n")
            head.pop("prompt_token_ids", None)
        await stream.write(b"data: [DONE]\n\n")
        return stream
