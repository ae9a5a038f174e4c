"""Calls of the engine by the client library that agents use."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import openai
import pytest

from agentlightning.engine.engine import InferenceEngine
from agentlightning.llm_proxy.dialects import CHAT

HI: Any = [{"role": "user", "content": "say so"}]


def body_of(engine: InferenceEngine, **fields: Any) -> dict[str, Any]:
    return {"model": engine.model_name, "messages": HI, "return_token_ids": True, "logprobs": True, **fields}


def ask(engine: InferenceEngine, **fields: Any) -> dict[str, Any]:
    """Return the reply as JSON, with token ids and log-probabilities."""
    with openai.OpenAI(base_url=engine.base_url, api_key="none", max_retries=0, timeout=60) as client:
        return client.post("/chat/completions", body=body_of(engine, **fields), cast_to=object)  # type: ignore[return-value]  # JSON


def refusal(engine: InferenceEngine, **fields: Any) -> tuple[int, dict[str, Any]]:
    """Return status and error of a call that is refused."""
    with pytest.raises(openai.APIStatusError) as refused:
        ask(engine, **fields)
    return refused.value.status_code, refused.value.body  # type: ignore[return-value]  # JSON


def stream(engine: InferenceEngine, **fields: Any) -> dict[str, Any]:
    """Return the reply that the frames of a stream make up, as the gateway reads them."""
    body = body_of(engine, **fields, stream=True)
    request = urllib.request.Request(f"{engine.base_url}/chat/completions", json.dumps(body).encode())
    reader = CHAT.read_stream(body)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
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
