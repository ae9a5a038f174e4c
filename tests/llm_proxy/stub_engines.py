"""The model server in the spellings of vLLM, SGLang, llama.cpp and a provider, each as its own API has them."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.stubs.model_replies import chat_frames, chat_reply, encode, logprobs_of, text_frames, text_reply
from tests.stubs.model_server import Exchange, ModelServer

Json = dict[str, Any]
ANSWER = "six times seven is 42"
OWNERS = {"vllm": "vllm", "sglang": "sglang", "llama.cpp": "llamacpp", "agentlightning": "agentlightning"}
OWNERS |= {"openai": "openai", "unknown": "somebody"}
"""The owner of the models of each engine."""
OF_SGLANG = ("return_prompt_token_ids", "return_meta_info")


def sglang_chat(request: Json, answer: Any, name: str, tokens: bool) -> Json:
    """SGLang 0.5.13: no `token_ids` in chat yet."""
    reply = chat_reply({**request, "return_token_ids": True}, answer, name, tokens)
    (choice,), prompt = reply["choices"], reply.pop("prompt_token_ids")
    ids = choice.pop("token_ids")
    if request.get("return_prompt_token_ids"):
        choice["prompt_token_ids"] = prompt
    if request.get("return_meta_info"):
        triples = [[value, token, None] for value, token in zip(logprobs_of(ids), ids, strict=True)]
        choice["meta_info"] = {"id": "x", "output_token_logprobs": triples}
    return {**reply, "metadata": {"weight_version": "default"}}


def llama_chat(request: Json, answer: Any, name: str, tokens: bool) -> Json:
    """The id of a token is an entry of its log-probability, and those of the prompt are nowhere."""
    if request.get("logprobs"):
        assert request.get("top_logprobs", 20) < 20, "without a number it gives twenty alternatives of each token"
    reply = chat_reply({**request, "return_token_ids": False}, answer, name, tokens)
    return {**reply, "choices": [_with_ids(choice, answer) for choice in reply["choices"]], "timings": {"prompt_n": 3}}


def llama_text(request: Json, answer: Any, name: str, tokens: bool) -> Json:
    reply = text_reply({**request, "return_token_ids": False}, answer, name, tokens)
    for choice in reply["choices"]:
        if choice["logprobs"]:
            values = choice["logprobs"]["token_logprobs"]
            choice["logprobs"] = {"content": [{"token": "x", "logprob": value} for value in values]}
    usage = {**reply["usage"], "prompt_tokens": len(request["prompt"])}
    return {**reply, "choices": [_with_ids(choice, answer) for choice in reply["choices"]], "usage": usage}


def _with_ids(choice: Json, answer: str) -> Json:
    for entry, token in zip((choice["logprobs"] or {}).get("content", ()), encode(answer), strict=False):
        entry["id"] = token
    return choice


class StubEngine(ModelServer):
    """One engine behind a socket."""

    def __init__(self, speech: str, *, lists_models: bool = True) -> None:
        super().__init__(lambda request: ANSWER)
        self._speech = speech
        self.models = [{"id": "m", "object": "model", "owned_by": OWNERS[speech]}]
        self.get_status = 200 if lists_models else 404
        if speech == "sglang":
            self.replies |= {"/v1/chat/completions": (sglang_chat, chat_frames)}
        if speech == "llama.cpp":
            texts = {"/v1/chat/completions": (llama_chat, chat_frames), "/v1/completions": (llama_text, text_frames)}
            self.replies |= texts

    async def _reply(self, exchange: Exchange, writer: asyncio.StreamWriter) -> bool:
        if self._speech == "openai":
            self.refused_fields = tuple(name for name in exchange.request if name.startswith("return_"))
        if self._speech == "sglang" and exchange.path == "/v1/chat/completions":
            self.refused_fields = OF_SGLANG if exchange.request.get("stream") else ()
        return await super()._reply(exchange, writer)
