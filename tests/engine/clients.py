"""How the tests of the engine ask it: through the client library that agents use."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai

from agentlightning.engine.engine import InferenceEngine
from agentlightning.llm_proxy.dialects import CHAT

HI: Any = [{"role": "user", "content": "say so"}]


@contextmanager
def client_of(engine: InferenceEngine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=engine.base_url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(engine: InferenceEngine, *, messages: Any = HI, **fields: Any) -> dict[str, Any]:
    """Return the reply as JSON, with token ids and log-probabilities."""
    body = {"model": engine.model_name, "messages": messages, "return_token_ids": True, "logprobs": True, **fields}
    with client_of(engine) as client:
        return client.post("/chat/completions", body=body, cast_to=object)  # type: ignore[return-value]  # JSON


def stream(engine: InferenceEngine, *, messages: Any = HI, **fields: Any) -> dict[str, Any]:
    """Return the reply that the frames of a stream make up, as the gateway reads them."""
    body = {"model": engine.model_name, "messages": messages, "return_token_ids": True, "logprobs": True, **fields}
    body["stream"] = True
    request = urllib.request.Request(f"{engine.base_url}/chat/completions", json.dumps(body).encode())
    reader = CHAT.read_stream(body)
    with urllib.request.urlopen(request, timeout=60) as answer:
        for frame in answer.read().split(b"\n\n"):
            reader.feed(frame)
    assert reader.ended
    reply = reader.reply()
    assert reply is not None
    return reply


def content(reply: dict[str, Any], index: int = 0) -> str:
    return reply["choices"][index]["message"]["content"]


def tokens(reply: dict[str, Any], index: int = 0) -> list[int]:
    return reply["choices"][index]["token_ids"]


def logprobs(reply: dict[str, Any], index: int = 0) -> list[float]:
    return [entry["logprob"] for entry in reply["choices"][index]["logprobs"]["content"]]
