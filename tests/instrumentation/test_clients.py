"""Spans of the clients of OpenAI: a real client, a model server on a socket, and the default tracer."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pydantic import BaseModel

import agentlightning as agl
from agentlightning.adapter import TracerTraceToTriplet, TraceToMessages
from agentlightning.types import Span
from tests.stubs.model_server import Fault, ModelServer

openai: Any = pytest.importorskip("openai", reason="openai is not installed")

pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings"),
]
SECRET = "sk-this-is-the-key-of-the-user-0123456789"
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "six times seven"}]
TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "description": "sums", "parameters": {"type": "object"}}}
]
TOKENS: Any = {"return_token_ids": True}


class Sum(BaseModel):
    value: int


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer(lambda request: "42") as running:
        yield running


@pytest.fixture(autouse=True)
def _left_open() -> Iterator[None]:
    yield
    gc.collect()  # here, so that no other test meets what a stream that was left early leaves open


@asynccontextmanager
async def tracing(tracer: agl.OtelTracer | None = None) -> Any:
    """An open trace; gives a function that returns its model calls."""
    own = tracer or agl.OtelTracer()
    with own.lifespan():
        async with own.trace_context("test"):
            yield lambda: [span for span in own.get_last_trace() if span.name.startswith("openai.")]


def client_of(server: ModelServer, kind: str = "OpenAI", **settings: Any) -> Any:
    return getattr(openai, kind)(base_url=server.base_url, api_key=SECRET, max_retries=0, **settings)


def check(spans: list[Span], server: ModelServer, *, prompt: int = 2, tokens: bool = True) -> None:
    """One call, as adapters read it, with what the server said; and no key."""
    [span] = spans
    reply = server.calls[-1].reply
    assert reply is not None
    assert span.attributes["gen_ai.response.id"] == reply["id"]
    assert SECRET not in span.model_dump_json()
    [triplet] = TracerTraceToTriplet().adapt([span])
    assert triplet.metadata["response_id"] == reply["id"]
    if tokens:
        assert triplet.prompt["token_ids"] == reply["prompt_token_ids"]
        assert triplet.response["token_ids"] == reply["choices"][0]["token_ids"]
        assert len(triplet.response["token_logprobs"]) == len(triplet.response["token_ids"])
    [call] = TraceToMessages().adapt([span])
    assert [message["role"] for message in call["messages"]] == ["system", "user", "assistant"][2 - prompt :]
    assert call["messages"][-1]["content"] == "42"


ASKED: Any = {"model": "policy", "messages": MESSAGES, "logprobs": True, "extra_body": TOKENS}


def _create(client: Any) -> Any:
    return client.chat.completions.create(**ASKED)


def _stream(client: Any) -> Any:
    return "".join(
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**ASKED, stream=True)
        if chunk.choices
    )


def _raw(client: Any) -> Any:
    return client.chat.completions.with_raw_response.create(**ASKED).parse()


def _raw_stream(client: Any) -> Any:
    raw = client.chat.completions.with_raw_response.create(**ASKED, stream=True)
    return len(list(raw.parse()))


def _stream_helper(client: Any) -> Any:
    with client.chat.completions.stream(**ASKED) as stream:
        return stream.get_final_completion()


def _options(client: Any) -> Any:
    return client.with_options(timeout=20).chat.completions.create(**ASKED)


@pytest.mark.parametrize("use", [_create, _stream, _raw, _raw_stream, _stream_helper, _options])
async def test_every_way_to_call_chat_completions_leaves_one_call_with_its_tokens(
    server: ModelServer, use: Callable[[Any], Any]
) -> None:
    async with tracing() as calls:
        with client_of(server) as client:
            use(client)
        check(calls(), server)


async def _a_create(client: Any) -> None:
    await client.chat.completions.create(**ASKED)


async def _a_stream(client: Any) -> None:
    async for _ in await client.chat.completions.create(**ASKED, stream=True):
        pass


async def _a_raw_stream(client: Any) -> None:
    raw = await client.chat.completions.with_raw_response.create(**ASKED, stream=True)
    async for _ in raw.parse():
        pass


async def _a_streaming_response(client: Any) -> None:
    async with client.chat.completions.with_streaming_response.create(**ASKED) as raw:
        await raw.parse()


async def _a_stream_helper(client: Any) -> None:
    async with client.chat.completions.stream(**ASKED) as stream:
        await stream.get_final_completion()


@pytest.mark.parametrize("use", [_a_create, _a_stream, _a_raw_stream, _a_streaming_response, _a_stream_helper])
async def test_every_asynchronous_way_does_too(server: ModelServer, use: Callable[[Any], Any]) -> None:
    async with tracing() as calls, client_of(server, "AsyncOpenAI") as client:
        await use(client)
        check(calls(), server)


async def test_parsed_answers_and_tools_are_read(server: ModelServer) -> None:
    server.answer = lambda request: '{"value": 42}'
    async with tracing() as calls:
        with client_of(server) as client:
            parsed = client.chat.completions.parse(model="policy", messages=MESSAGES, response_format=Sum)
            assert parsed.choices[0].message.parsed == Sum(value=42)
            call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
            server.answer = lambda request: {"content": None, "tool_calls": [call]}
            for stream in (False, True):
                reply = client.chat.completions.create(model="policy", messages=MESSAGES, tools=TOOLS, stream=stream)
                list(reply)
        first, *others = calls()
        assert json.loads(first.attributes["gen_ai.completion.0.content"]) == {"value": 42}
        for span in others:
            [conversation] = TraceToMessages().adapt([span])
            assert conversation["messages"][-1]["tool_calls"][0]["function"] == call["function"]
            assert conversation["tools"] == [TOOLS[0]]


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_are_calls_as_adapters_read_them(server: ModelServer, stream: bool) -> None:
    async with tracing() as calls:
        with client_of(server) as client:
            reply = client.responses.create(
                model="policy", instructions="Be brief.", input="six times seven", stream=stream
            )
            list(reply)
        check(calls(), server, tokens=False)


@pytest.mark.parametrize("stream", [False, True])
async def test_text_completions_are_calls_too_and_embeddings_are_none(server: ModelServer, stream: bool) -> None:
    async with tracing() as calls:
        with client_of(server) as client:
            list(client.completions.create(model="policy", prompt="six times seven", stream=stream))
            check(calls(), server, prompt=1, tokens=False)
            client.embeddings.create(model="policy", input="six", encoding_format="float")
        embedding = calls()[-1]
        assert embedding.name == "openai.embeddings"
        assert len(TracerTraceToTriplet().adapt(calls())) == 1


# --- nothing changes for the program ---------------------------------------------------------------------------------


async def test_request_and_reply_are_those_of_an_untraced_program(server: ModelServer) -> None:
    def asked() -> tuple[Any, Any, Any]:
        with client_of(server) as client:
            whole = client.chat.completions.create(**ASKED)
            stream = client.chat.completions.create(**ASKED, stream=True)
            return type(whole), type(stream), [chunk.model_dump(exclude={"id", "created"}) for chunk in stream]

    without = asked()
    async with tracing():
        assert asked() == without
    headers = [{k: v for k, v in call.headers.items() if k != "host"} for call in server.calls]
    assert headers[:2] == headers[2:]
    assert [call.request for call in server.calls[:2]] == [call.request for call in server.calls[2:]]


async def test_outside_of_a_trace_and_after_the_tracer_the_client_is_as_it_was(server: ModelServer) -> None:
    before = openai.OpenAI.request, openai.AsyncOpenAI.request
    first, second = agl.OtelTracer(), agl.OtelTracer()
    with first.lifespan():
        with second.lifespan(), client_of(server) as client:
            _create(client)
        async with first.trace_context("test"):
            with client_of(server) as client:
                _create(client)
            assert len(first.get_last_trace()) == 1
        assert openai.OpenAI.request is not before[0]
    assert (openai.OpenAI.request, openai.AsyncOpenAI.request) == before
    assert "request" not in vars(openai.OpenAI)


# --- how calls end ---------------------------------------------------------------------------------------------------


async def test_an_error_is_recorded_without_the_key_and_goes_on(server: ModelServer) -> None:
    server.faults.append(Fault(401, json.dumps({"error": {"message": f"Incorrect API key: {SECRET}"}}).encode()))
    async with tracing() as calls:
        with client_of(server) as client, pytest.raises(openai.AuthenticationError):
            _create(client)
        [span] = calls()
        assert span.status.status_code == "ERROR"
        assert [event.name for event in span.events] == ["exception"]
        assert SECRET not in span.model_dump_json()


async def test_a_stream_that_breaks_off_is_an_error_with_the_text_that_came(server: ModelServer) -> None:
    server.answer = lambda request: "one two three four five"
    server.faults.append(Fault(cut="middle"))
    async with tracing() as calls:
        with client_of(server) as client, pytest.raises(Exception, match=r".*"):
            _stream(client)
        [span] = calls()
        assert span.status.status_code == "ERROR"
        assert "response_token_ids" not in span.attributes


@pytest.mark.parametrize("how", ["close", "with", "dropped", "kept"])
async def test_a_stream_that_is_left_early_has_its_text_and_no_tokens(server: ModelServer, how: str) -> None:
    server.answer = lambda request: "one two three four five"
    streams: list[Any] = []
    async with tracing() as calls:
        with client_of(server) as client:
            stream = client.chat.completions.create(**ASKED, stream=True)
            for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    break
            if how == "close":
                stream.close()
            elif how == "with":
                with stream:
                    pass
            elif how == "dropped":
                del stream
                gc.collect()
            else:
                streams.append(stream)
        recorded_calls = calls()
        assert len(recorded_calls) == (how != "kept")
    [span] = calls() or recorded_calls
    assert span.attributes["gen_ai.completion.0.content"].startswith("one")
    assert "response_token_ids" not in span.attributes
    assert "logprobs.content" not in span.attributes


async def test_threads_and_tasks_keep_their_calls_apart(server: ModelServer) -> None:
    server.answer = lambda request: request["messages"][-1]["content"]
    tracer = agl.OtelTracer()

    async def rollout(name: str) -> list[Any]:
        async with tracer.trace_context(name):
            body: Any = {"model": "policy", "messages": [{"role": "user", "content": name}]}
            async with client_of(server, "AsyncOpenAI") as client:
                await asyncio.gather(*(client.chat.completions.create(**body) for _ in range(3)))
            with client_of(server) as plain:
                await asyncio.to_thread(plain.chat.completions.create, **body)
                thread = threading.Thread(target=plain.chat.completions.create, kwargs=body)
                thread.start()
                await asyncio.to_thread(thread.join)
            return [span.attributes["gen_ai.completion.0.content"] for span in tracer.get_last_trace()]

    with tracer.lifespan():
        names = [f"rollout {number}" for number in range(4)]
        assert await asyncio.gather(*map(rollout, names)) == [[name] * 5 for name in names]


# --- with others -----------------------------------------------------------------------------------------------------


async def test_a_call_that_another_instrumentation_records_has_no_second_span(server: ModelServer) -> None:
    from opentelemetry import trace

    async with tracing() as calls:
        with client_of(server) as client:
            named = {"openinference.span.kind": "LLM"}
            with trace.get_tracer("another").start_as_current_span("ChatCompletion", attributes=named):
                _create(client)
            assert calls() == []
            with trace.get_tracer("another").start_as_current_span(
                "chain", attributes={"openinference.span.kind": "CHAIN"}
            ):
                _create(client)
        assert len(calls()) == 1


class FunctionWrapper:
    """A wrapper that replaces a function, as `wrapt` does for instrumentations."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else self.wrapped.__get__(instance, owner)


@pytest.mark.parametrize("place", ["OpenAI.request", "resources.chat.completions.Completions.create"])
async def test_what_others_have_wrapped_is_left_to_them(
    server: ModelServer, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    *path, name = place.split(".")
    owner = openai
    for part in path:
        owner = getattr(owner, part)
    monkeypatch.setattr(owner, name, FunctionWrapper(getattr(owner, name)))
    async with tracing() as calls:
        with client_of(server) as client:
            _create(client)
        assert calls() == []


async def test_a_call_through_the_gateway_is_counted_once(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGL_TOKEN", raising=False)

    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> float:
        async with openai.AsyncOpenAI(base_url=llm.get_base_url(), api_key=llm.api_key or "unused") as client:
            await client.chat.completions.create(model=llm.model, messages=MESSAGES)
            async for _ in await client.chat.completions.create(model=llm.model, messages=MESSAGES[1:], stream=True):
                pass
        return 1.0

    @agl.algo
    async def once(*, store: agl.LightningStore, llm_proxy: agl.LLMProxy) -> list[Span]:
        await llm_proxy.start()
        await store.add_resources({"main_llm": llm_proxy.as_resource()})
        rollout = await store.enqueue_rollout("task", mode="train")
        await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=30)
        await llm_proxy.stop()
        return list(await store.query_spans(rollout.rollout_id))

    trainer = agl.Trainer(algorithm=once, llm_proxy=agl.LLMProxy(model_list=[server.entry("policy")]), strategy="shm")
    trainer.fit(agent)
    spans = trainer.result
    assert sorted(span.name for span in spans if "." in span.name and "annotation" not in span.name) == [
        "openai.chat.completion",
        "openai.chat.completion",
    ]
    assert [t.reward for t in TracerTraceToTriplet().adapt(spans)] == [None, 1.0]
    explanation = TracerTraceToTriplet().explain(spans)
    assert [(each.seen_by, each.matched_by) for each in explanation.calls] == [("both", "response_id")] * 2
    assert len(explanation.trainable) == 2
    assert len(TraceToMessages().adapt(spans)) == 2


@pytest.mark.parametrize("route", ["chat", "responses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_words_and_tokens_of_a_call_through_the_gateway_are_the_gateways_to_keep(
    route: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGL_TOKEN", raising=False)
    store = agl.InMemoryLightningStore()
    claimed = await store.start_rollout("task")
    with ModelServer(lambda request: "forty-two") as server:
        proxy = agl.LLMProxy(model_list=[server.entry("policy")], store=store, keep="tokens", launch_mode="asyncio")
        await proxy.start()
        llm = proxy.as_resource().with_attempted_rollout(claimed)
        async with tracing() as calls, openai.AsyncOpenAI(base_url=llm.get_base_url(), api_key="none") as client:
            words: Any = {"messages": MESSAGES} if route == "chat" else {"input": "six times seven"}
            create = client.chat.completions.create if route == "chat" else client.responses.create
            reply = await create(model="policy", stream=stream, **words)
            if stream:
                assert [chunk async for chunk in reply]
            [span] = calls()
        await proxy.stop()
    recorded = [*await store.query_spans(claimed.rollout_id)]
    assert "six times seven" not in str([span, *recorded])
    assert "forty-two" not in str(span)
    assert "prompt_token_ids" not in span.attributes
    assert span.attributes["gen_ai.response.id"] in str(recorded)


@asynccontextmanager
async def traced_attempt(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A gateway, and an open trace of an attempt; gives LLM and proxy. At its end `SPANS` are its spans."""
    monkeypatch.delenv("AGL_TOKEN", raising=False)
    store, tracer = agl.InMemoryLightningStore(), agl.OtelTracer()
    claimed = await store.start_rollout("task")
    ids = {"rollout_id": claimed.rollout_id, "attempt_id": claimed.attempt.attempt_id}
    proxy = agl.LLMProxy(model_list=[server.entry("policy")], store=store)
    await proxy.start()
    with tracer.lifespan(store):
        async with tracer.trace_context("test", **ids):
            yield proxy.as_resource().with_attempted_rollout(claimed), proxy
    await proxy.stop()
    SPANS[:] = await store.query_spans(claimed.rollout_id)


SPANS: list[Span] = []
"""Spans of the attempt that `traced_attempt` made last."""


@pytest.mark.parametrize("package", ["openai", "anthropic"])  # the latter names its spans of its own accord
@pytest.mark.parametrize("stream", [False, True])
async def test_calls_with_equal_words_that_the_program_breaks_off_are_matched_by_the_span_that_they_name(
    stream: bool, package: str, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    library: Any = pytest.importorskip(package, reason=f"{package} is not installed")
    body: Any = {"model": "policy", "messages": MESSAGES[1:], "stream": stream}
    server.hold()
    async with traced_attempt(server, monkeypatch) as (llm, proxy):
        kind = library.AsyncOpenAI if package == "openai" else library.AsyncAnthropic
        client = kind(base_url=llm.get_base_url(), api_key=llm.api_key or "unused")
        create = client.chat.completions.create if package == "openai" else client.messages.create
        agents = [asyncio.create_task(create(**body, max_tokens=place)) for place in range(1, 14)]
        await server.until(lambda calls: len(calls) == 13)
        for one in agents:
            one.cancel()
        await asyncio.gather(*agents, return_exceptions=True)
        await client.close()
        while proxy.calls_in_hand():  # noqa: ASYNC110 -- the gateway's thread has no event to offer
            await asyncio.sleep(0.01)
        server.release()
    explained = TracerTraceToTriplet().explain(SPANS).calls
    assert [(one.call.state, one.seen_by, one.matched_by) for one in explained] == [
        ("client_left", "both", "traceparent")
    ] * 13
    for one in explained:
        request, client_span = one.call.spans.request, one.call.spans.seen
        assert request.attributes["gen_ai.request.max_tokens"] == client_span.attributes["gen_ai.request.max_tokens"]


@pytest.mark.parametrize("kind", ["OpenAI", "AsyncOpenAI"])
@pytest.mark.parametrize("own", [None, "00-" + "a" * 32 + "-" + "b" * 16 + "-00"])
async def test_a_request_names_its_span_to_the_gateway_unless_the_program_names_one(
    own: str | None, kind: str, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with traced_attempt(server, monkeypatch) as (llm, _):
        client = client_of(server, kind).with_options(base_url=llm.get_base_url(), api_key="none")
        headers = {"traceparent": own} if own else {}
        if kind == "OpenAI":
            create = client.chat.completions.create
            await asyncio.to_thread(create, model="policy", messages=MESSAGES, extra_headers=headers)
        else:
            await client.chat.completions.create(model="policy", messages=MESSAGES, extra_headers=headers)
    [span] = [span for span in SPANS if span.name.startswith("openai.")]
    [record] = [span for span in SPANS if span.name == "raw_gen_ai_request"]
    named = own.split("-")[1:3] if own else [span.trace_id, span.span_id]
    assert record.attributes["agentlightning.call.client_span"] == "-".join(named)
    assert "traceparent" not in server.calls[-1].headers


async def test_a_request_to_another_server_names_no_span(server: ModelServer) -> None:
    async with tracing() as calls:
        with client_of(server) as client:
            _create(client)
        assert len(calls()) == 1
    assert "traceparent" not in server.calls[-1].headers
