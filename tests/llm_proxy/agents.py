"""Agents that call the gateway with the client libraries of OpenAI and Anthropic, one class for each dialect."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, ClassVar

import anthropic
import openai

from agentlightning.types import AttemptedRollout
from tests.llm_proxy.harness import HI, GatewayHarness, Json


class Agent:
    """An attempt, the harness's own unless another one is given, with a client library pointed at it."""

    client: Any
    library: ClassVar[Any] = openai.AsyncOpenAI
    tail = "/v1"
    reply = "response"
    defaults: ClassVar[Json] = {}

    def __init__(
        self,
        harness: GatewayHarness,
        attempt: AttemptedRollout | None = None,
        *,
        like: Agent | None = None,
        **options: Any,
    ) -> None:
        """Make a client; with `like` one that shares the connections of that agent's."""
        self.harness, self.attempt = harness, attempt or harness.own
        options = {"base_url": harness.url(self.tail, of=self.attempt), **options}
        if like is not None:
            self.client = like.client.with_options(**options)
        else:
            self.client = self.library(**{"api_key": "none", "max_retries": 0, **options})

    @property
    def resource(self) -> Any:
        return self.client.responses

    async def ask(self, **fields: Any) -> Any:
        return await self.resource.create(**{"model": "policy", **self.defaults, **fields})

    def stream(self, **fields: Any) -> Any:
        return self.resource.stream(**{"model": "policy", **self.defaults, **fields})

    async def whole(self, streamed: bool, heard: Callable[[], object] = lambda: None, **fields: Any) -> Any:
        """Return the reply, put together by the library where it comes as a stream; `heard` is called at each event."""
        if not streamed:
            return await self.ask(**fields)
        async with self.stream(**fields) as stream:
            async for _ in stream:
                heard()
            return await getattr(stream, f"get_final_{self.reply}")()

    def says(self, words: str) -> Json:
        """Return the fields of a request that says these words alone."""
        return {"input": words}

    def text(self, reply: Any) -> str:
        """Return the text of a whole reply."""
        return reply.output_text

    def text_of(self, event: Any) -> str:
        """Return the text that one event of a stream adds."""
        return event.delta if event.type == "response.output_text.delta" else ""

    async def events(self, **fields: Any) -> AsyncGenerator[Any, None]:
        """Yield the events of a stream as they come."""
        async with await self.ask(stream=True, **fields) as stream:
            async for event in stream:
                yield event

    async def wire_events(self, **fields: Any) -> list[Json]:
        """Return the events of a stream as they come over the wire, each named as its type."""
        body = {"model": "policy", **self.defaults, "stream": True, **fields}
        route = next(route for route, kind in AGENTS.items() if isinstance(self, kind))
        async with self.harness.session.post(self.harness.url(f"/v1/{route}"), json=body) as reply:
            assert (reply.status, reply.content_type) == (200, "text/event-stream")
            frames = [frame.split("\n") for frame in (await reply.text()).split("\n\n") if frame]
        events = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in frames]
        assert all(name == data["type"] for name, data in events)
        return [data for _, data in events]

    async def pieces(self, **fields: Any) -> AsyncGenerator[str, None]:
        """Yield the texts of a stream as they come."""
        async with aclosing(self.events(**fields)) as events:
            async for event in events:
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
    library = anthropic.AsyncAnthropic
    tail = ""
    reply = "message"

    @property
    def resource(self) -> Any:
        return self.client.messages

    def says(self, words: str) -> Json:
        return {"messages": [{"role": "user", "content": words}]}

    def text(self, reply: Any) -> str:
        return "".join(block.text for block in reply.content if block.type == "text")

    def text_of(self, event: Any) -> str:
        return getattr(event.delta, "text", "") if event.type == "content_block_delta" else ""


class ChatAgent(Agent):
    defaults: ClassVar[Json] = {"messages": HI}
    reply = "completion"

    @property
    def resource(self) -> Any:
        return self.client.chat.completions

    def says(self, words: str) -> Json:
        return {"messages": [{"role": "user", "content": words}]}

    def text(self, reply: Any) -> str:
        return reply.choices[0].message.content or ""

    def text_of(self, event: Any) -> str:
        return (event.choices[0].delta.content or "") if event.choices else ""


class TextAgent(Agent):
    defaults: ClassVar[Json] = {"prompt": "once upon"}

    @property
    def resource(self) -> Any:
        return self.client.completions

    def says(self, words: str) -> Json:
        return {"prompt": words}

    def text(self, reply: Any) -> str:
        return reply.choices[0].text

    def text_of(self, event: Any) -> str:
        return event.choices[0].text if event.choices else ""


AGENTS: dict[str, type[Agent]] = {
    "chat/completions": ChatAgent,
    "completions": TextAgent,
    "messages": MessagesAgent,
    "responses": ResponsesAgent,
}
