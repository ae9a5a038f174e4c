"""The chat endpoint: over VERL's client (needs no verl), and for invalid requests."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from agentlightning.demo.model import make_tokenizer
from agentlightning.engine.chat_server import ChatServer
from agentlightning.engine.engine import InferenceEngine
from agentlightning.engine.service import ServedAs
from tests.engine.clients import HI

TOKEN = "a-token-of-this-test-alone"
Ask = Callable[..., Awaitable[tuple[int, Any]]]


class Client:
    """Generates as VERL's client does, but always the same text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokens: list[int] = tokenizer.encode("12+34", add_special_tokens=False)
        self.logprobs: list[float] | None = [-0.5] * len(self.tokens)
        self.asked: list[dict[str, Any]] = []

    async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        self.asked.append(sampling_params)
        return SimpleNamespace(token_ids=self.tokens, log_probs=self.logprobs, extra_fields={"global_steps": 3})


@pytest.fixture
async def served() -> AsyncGenerator[tuple[Client, Ask]]:
    tokenizer: Any = make_tokenizer()
    client = Client(tokenizer)
    as_policy = ServedAs("policy", frozenset((tokenizer.eos_token_id,)), len(tokenizer), 256, 16, 0, "agl.VERL")
    server = ChatServer(client, tokenizer, as_policy, token=TOKEN)
    await server.start("127.0.0.1")
    body = {"model": "policy", "messages": [{"role": "user", "content": "1"}]}
    body |= {"logprobs": True, "return_token_ids": True}

    async def send(*, token: str = TOKEN, **fields: Any) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {token}"}
        address = f"{server.base_url}/chat/completions"
        async with aiohttp.ClientSession() as http, http.post(address, json=body | fields, headers=headers) as reply:
            return reply.status, await reply.json()

    try:
        yield client, send
    finally:
        server.stop()


async def test_a_reply_has_the_tokens_their_probabilities_and_the_version(served: tuple[Client, Ask]) -> None:
    client, send = served
    _, reply = await send(temperature=0.7, max_tokens=5, n=2)
    assert [choice["token_ids"] for choice in reply["choices"]] == [client.tokens] * 2
    assert [one["logprob"] for one in reply["choices"][0]["logprobs"]["content"]] == client.logprobs
    assert reply["system_fingerprint"] == "agl-w3"
    assert reply["choices"][0]["finish_reason"] == "length"
    assert client.asked[0] == {"temperature": 0.7, "top_p": 1.0, "max_tokens": 5, "logprobs": True}


async def test_top_p_and_top_k_are_passed_on(served: tuple[Client, Ask]) -> None:
    client, send = served
    status, _ = await send(temperature=1.0, max_tokens=5, top_p=0.9, top_k=4, min_p=0, repetition_penalty=1)
    assert status == 200
    assert client.asked == [{"temperature": 1.0, "top_p": 0.9, "top_k": 4, "max_tokens": 5, "logprobs": True}]


async def test_a_reply_ends_at_a_stop_text_with_the_tokens_up_to_it(served: tuple[Client, Ask]) -> None:
    client, send = served
    _, reply = await send(stop=["+"])
    choice = reply["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "12")
    assert choice["token_ids"] == client.tokens[: len(choice["token_ids"])]
    assert len(choice["token_ids"]) < len(client.tokens)


@pytest.mark.parametrize(
    "fields",
    [
        *({"response_format": {"type": "json_object"}}, {"frequency_penalty": 0.5}, {"top_logprobs": 2}),
        *({"min_tokens": 2}, {"min_p": 0.5}, {"repetition_penalty": 1.5}, {"top_k": 3, "min_p": 0.5}),
    ],
)
async def test_what_would_be_drawn_from_another_distribution_is_refused(
    served: tuple[Client, Ask], fields: dict[str, Any]
) -> None:
    client, send = served
    status, reply = await send(**fields)
    assert status == 400
    assert "agl.VERL supports temperature" in reply["error"]["message"]
    assert client.asked == []


async def test_a_call_without_the_token_or_a_reply_without_probabilities_is_an_error(
    served: tuple[Client, Ask],
) -> None:
    client, send = served
    status, _ = await send(token="another")
    assert (status, client.asked) == (401, [])
    client.logprobs = None
    status, reply = await send()
    assert status == 500
    assert "tokens and 0 log-probabilities" in reply["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000])
def test_a_body_that_is_not_json_is_refused(byte_engine: InferenceEngine, body: bytes) -> None:
    status, answer = _post(byte_engine, body)
    assert (status, answer["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    "field",
    ['"tools": [{"type": "function", "function": {"name": "f", "parameters": %s}}]', '"chat_template_kwargs": %s'],
)
@pytest.mark.parametrize("depth", [800, 100_000])
def test_a_body_nested_too_deeply_is_no_fault_of_the_engine(
    byte_engine: InferenceEngine, field: str, depth: int
) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    body = f'{{"model": "policy", "max_tokens": 1, "messages": {json.dumps(HI)}, {field % deep}}}'
    status, _ = _post(byte_engine, body.encode())
    assert status in (200, 400)  # the depth that is too much differs between versions of Python


def _post(engine: InferenceEngine, body: bytes) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(f"{engine.base_url}/chat/completions", body)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, json.load(refused)
