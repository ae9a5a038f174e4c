"""Sources of a `Chat`: real clients of OpenAI's package, and callables of every kind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

import agentlightning as agl
from tests.stubs.model_server import Fault, ModelServer

REPLY = {
    "model": "of-the-reply",
    "choices": [{"message": {"content": [{"type": "text", "text": "par"}, {"type": "text", "text": "ts"}]}}],
    "usage": {"prompt_tokens": 11, "completion_tokens": 3},
}


@pytest.fixture
def model() -> Iterator[ModelServer]:
    with ModelServer(lambda request: "an answer") as server:
        yield server


async def test_an_async_client_is_asked_and_retried_by_chat_alone(model: ModelServer) -> None:
    model.faults = [Fault(500, headers={"retry-after": "0"}), Fault(429, headers={"retry-after": "0"})]
    async with openai.AsyncOpenAI(base_url=model.base_url, api_key="k", max_retries=7) as client:
        chat = agl.Chat(client, retries=2)
        reply = await chat.ask("hello", model="m", temperature=0.3)
    assert (reply.text, chat.bill.retries, len(model.calls)) == ("an answer", 2, 3)
    assert model.calls[-1].request["temperature"] == 0.3


async def test_what_is_final_for_a_client_is_final(model: ModelServer) -> None:
    model.faults = [Fault(401)]
    async with openai.AsyncOpenAI(base_url=model.base_url, api_key="k") as client:
        with pytest.raises(agl.ChatError, match="AuthenticationError"):
            await agl.Chat(client).ask("hello", model="m")
    assert len(model.calls) == 1


async def test_a_sync_client_does_not_block_the_loop(model: ModelServer) -> None:
    model.hold()
    with openai.OpenAI(base_url=model.base_url, api_key="k") as client:
        call = asyncio.create_task(agl.Chat(client, model="m").ask("hello"))
        await model.until(lambda calls: len(calls) == 1)
        model.release()
        assert (await call).text == "an answer"


async def test_a_server_that_is_not_there_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.chat.chat._FIRST_DELAY", 0.01)
    async with openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="k") as client:
        chat = agl.Chat(client, retries=1)
        with pytest.raises(agl.ChatError, match="APIConnectionError"):
            await chat.ask("hello", model="m")
    assert chat.bill.requests == 2


async def async_text(messages: list[dict[str, Any]]) -> str:
    return f"async {messages[0]['content']}"


def plain_text(conversation: list[dict[str, Any]], model: str) -> str:
    assert threading.current_thread() is not threading.main_thread()
    return f"{model} {conversation[0]['content']}"


async def a_reply(*, messages: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    assert settings == {"model": "m", "temperature": 0.5}
    return REPLY


class Answers:
    async def __call__(self, messages: list[dict[str, Any]], **settings: Any) -> str:
        return "object"


@pytest.mark.parametrize(
    ("source", "text"),
    [(async_text, "async hi"), (plain_text, "m hi"), (a_reply, "parts"), (Answers(), "object")],
    ids=["async", "plain", "reply", "object"],
)
async def test_a_callable_is_given_what_it_takes(source: Any, text: str) -> None:
    reply = await agl.Chat(source, model="m", temperature=0.5).ask("hi")
    assert reply.text == text
    if source is a_reply:
        assert (reply.model, reply.prompt_tokens, reply.completion_tokens) == ("of-the-reply", 11, 3)
    else:
        assert (reply.prompt_tokens, reply.completion_tokens) == (1, -(-len(text) // 4)), "a quarter of the characters"


async def test_a_bug_in_a_callable_is_no_reason_to_ask_again() -> None:
    calls: list[int] = []

    async def broken(messages: list[dict[str, Any]]) -> str:
        calls.append(1)
        return {}["text"]  # type: ignore[no-any-return]

    with pytest.raises(agl.ChatError, match="broken failed: KeyError"):
        await agl.Chat(broken).ask("hi")
    assert calls == [1]


def test_what_cannot_answer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"an agl\.LLM, a client with chat\.completions\.create.*got int"):
        agl.Chat(3)
    with pytest.raises(ValueError, match="as_resource"):
        agl.Chat(agl.ProxyLLM(endpoint="http://127.0.0.1:1", model="m"))
