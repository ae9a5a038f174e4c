"""Agents that call the gateway with the client libraries of OpenAI and Anthropic, one class for each dialect."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, ClassVar

import anthropic
import openai

from agentlightning.types import AttemptedRollout
from tests.llm_proxy.harness import GatewayHarness, Json

HI: Any = [{"role": "user", "content": "hi"}]


class Agent:
    """An attempt, the harness's own unless another one is given, with a client library pointed at it."""

    client: Any
    reply = "response"
    defaults: ClassVar[Json] = {}

    def __init__(self, harness: GatewayHarness, attempt: AttemptedRollout | None = None, **options: Any) -> None:
        self.harness, self.attempt = harness, attempt or harness.own
        self.client = self.make_client({"api_key": "none", "max_retries": 0, **options})

    def make_client(self, options: Json) -> Any:
        return openai.AsyncOpenAI(**{"base_url": self.harness.url("/v1", of=self.attempt), **options})

    @property
    def resource(self) -> Any:
        return self.client.responses

    async def ask(self, **fields: Any) -> Any:
        return await self.resource.create(**{"model": "policy", **self.defaults, **fields})

    def stream(self, **fields: Any) -> Any:
        return self.resource.stream(**{"model": "policy", **self.defaults, **fields})

    async def whole(self, streamed: bool, **fields: Any) -> Any:
        """Return the reply, put together by the library where it comes as a stream."""
        if not streamed:
            return await self.ask(**fields)
        async with self.stream(**fields) as stream:
            if self.reply == "completion":  # whose stream is not read by its final reply
                await stream.until_done()
            return await getattr(stream, f"get_final_{self.reply}")()

    def text_of(self, event: Any) -> str:
        """Return the text that one event of a stream adds."""
        return event.delta if event.type == "response.output_text.delta" else ""

    async def pieces(self, **fields: Any) -> AsyncGenerator[str, None]:
        """Yield the texts of a stream as they come."""
        async with await self.ask(stream=True, **fields) as stream:
            async for event in stream:
                if text := self.text_of(event):
                    yield text

    async def recorded(self) -> tuple[Json, Json]:
        """Return the record of the one call: the attributes of its texts, and the typed ones."""
        (parent,) = [span for span in await self.harness.spans(self.attempt) if span.name == "litellm_request"]
        (call,) = await self.harness.raw(self.attempt)
        return dict(parent.attributes), call

    @property
    def asked(self) -> Json:
        """Return the last request to the model server."""
        return self.harness.model.calls[-1].request


class ResponsesAgent(Agent):
    defaults: ClassVar[Json] = {"input": "hi"}


class MessagesAgent(Agent):
    defaults: ClassVar[Json] = {"max_tokens": 50, "messages": HI}
    reply = "message"

    def make_client(self, options: Json) -> Any:
        return anthropic.AsyncAnthropic(**{"base_url": self.harness.url("", of=self.attempt), **options})

    @property
    def resource(self) -> Any:
        return self.client.messages

    def text_of(self, event: Any) -> str:
        return getattr(event.delta, "text", "") if event.type == "content_block_delta" else ""


class ChatAgent(Agent):
    defaults: ClassVar[Json] = {"messages": HI}
    reply = "completion"

    @property
    def resource(self) -> Any:
        return self.client.chat.completions

    def text_of(self, event: Any) -> str:
        return (event.choices[0].delta.content or "") if event.choices else ""


class TextAgent(Agent):
    defaults: ClassVar[Json] = {"prompt": "once upon"}

    @property
    def resource(self) -> Any:
        return self.client.completions

    def text_of(self, event: Any) -> str:
        return event.choices[0].text if event.choices else ""


AGENTS: dict[str, type[Agent]] = {
    "chat/completions": ChatAgent,
    "completions": TextAgent,
    "messages": MessagesAgent,
    "responses": ResponsesAgent,
}
