"""Anthropic's messages through the gateway, with their own client library: what it gets, and what is recorded of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

from agentlightning.types import AttemptedRollout
from tests.llm_proxy.harness import GatewayHarness, until
from tests.stubs.model_server import Fault, encode, logprobs_of

Json = dict[str, Any]
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "top_k": 3}  # of API version 2023-06-01, which the library left behind
SSE = {"Content-Type": "text/event-stream"}
HI = [{"role": "user", "content": "hi"}]
PNG = "iVBORw0KGgo="
TOOL = {
    "name": "add",
    "description": "sum",
    "input_schema": {"type": "object", "properties": {"a": {"type": "number"}}},
}
CALL = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "ü"}'}}
TEXT = "Two  spaces\n\n    and a block:\n```python\nx = 'e\u0301 \U0001f600'\n```"


class Agent:
    """An attempt with the client library pointed at it."""

    def __init__(self, harness: GatewayHarness, attempt: AttemptedRollout, **options: Any) -> None:
        self.harness, self.attempt = harness, attempt
        options = {"base_url": harness.url(attempt, ""), "api_key": "none", "max_retries": 0, **options}
        self.client = anthropic.AsyncAnthropic(**options)

    async def ask(self, **fields: Any) -> Any:
        return await self.client.messages.create(**{"model": "policy", "max_tokens": 50, "messages": HI, **fields})

    def stream(self, **fields: Any) -> Any:
        return self.client.messages.stream(**{"model": "policy", "max_tokens": 50, "messages": HI, **fields})

    async def recorded(self) -> tuple[Json, Json]:
        """Return what is recorded of the one call: the attributes of what was said, and the typed ones."""
        (parent,) = [span for span in await self.harness.spans(self.attempt) if span.name == "litellm_request"]
        (call,) = await self.harness.raw(self.attempt)
        return dict(parent.attributes), call

    @property
    def asked(self) -> Json:
        """What the model server was asked last."""
        return self.harness.model.calls[-1].request


@pytest.fixture
async def agent(harness: GatewayHarness) -> AsyncGenerator[Agent, None]:
    made = Agent(harness, await harness.attempt())
    async with made.client:
        yield made


# --- replies ---------------------------------------------------------------------------------------------------------


async def test_a_reply_is_read_by_the_library_and_recorded_with_the_engines_tokens(agent: Agent) -> None:
    message = await agent.ask(messages=[{"role": "user", "content": "hi there"}])
    assert [block.text for block in message.content] == ["you said hi there"]
    assert (message.stop_reason, message.role, message.model) == ("end_turn", "assistant", "policy")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (4, 4)
    said, call = await agent.recorded()
    assert said["gen_ai.response.id"] == message.id
    assert said["gen_ai.prompt.0.content"] == "hi there"
    assert said["gen_ai.completion.0.content"] == "you said hi there"
    assert said["llm.request.type"] == "chat"
    assert (call["state"], call["dialect"]) == ("ok", "messages")
    assert call["prompt_token_ids"] == encode("user hi there assistant")
    assert call["completion_token_ids"] == encode("you said hi there")
    assert call["completion_logprobs"] == logprobs_of(encode("you said hi there"))


async def test_the_synchronous_client_reads_the_same(harness: GatewayHarness) -> None:
    attempt = await harness.attempt()

    def ask() -> tuple[Any, Any]:
        with anthropic.Anthropic(base_url=harness.url(attempt, ""), api_key="none", max_retries=0) as client:
            plain = client.messages.create(model="policy", max_tokens=9, messages=HI)
            with client.messages.stream(model="policy", max_tokens=9, messages=HI) as stream:
                return plain, stream.get_final_message()

    plain, streamed = await asyncio.to_thread(ask)
    assert plain.content[0].text == streamed.content[0].text == "you said hi"
    assert await harness.states(attempt) == ["ok", "ok"]


async def test_thoughts_words_and_tool_calls_are_blocks_in_this_order(agent: Agent) -> None:
    answer = {"reasoning_content": "let me see", "content": TEXT, "tool_calls": [CALL]}
    agent.harness.model.answer = lambda request: answer
    message = await agent.ask(tools=[TOOL])
    thought, text, tool = message.content
    assert (thought.thinking, text.text) == ("let me see", TEXT)
    assert (tool.id, tool.name, tool.input) == ("call-1", "add", {"a": 1, "b": "ü"})
    assert message.stop_reason == "tool_use"
    said, _ = await agent.recorded()
    assert said["gen_ai.completion.0.reasoning_content"] == "let me see"
    assert said["gen_ai.completion.0.tool_calls.0.arguments"] == '{"a": 1, "b": "ü"}'
    assert said["llm.request.functions.0.name"] == "add"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"content": "x", "finish_reason": "stop"}, ("end_turn", None)),
        ({"content": "x", "finish_reason": "stop", "stop_reason": "END"}, ("stop_sequence", "END")),
        ({"content": "x", "finish_reason": "stop", "stop_reason": "<|im_end|>"}, ("end_turn", None)),
        ({"content": "x", "finish_reason": "stop", "stop_reason": 151645}, ("end_turn", None)),
        ({"content": "x", "finish_reason": "length"}, ("max_tokens", None)),
        ({"content": "x", "finish_reason": "content_filter"}, ("refusal", None)),
        ({"content": None, "refusal": "I will not", "finish_reason": "stop"}, ("refusal", None)),
        ({"content": None, "tool_calls": [CALL], "finish_reason": "tool_calls"}, ("tool_use", None)),
        ({"content": None, "tool_calls": [CALL], "finish_reason": "stop"}, ("tool_use", None)),
    ],
)
@pytest.mark.parametrize("streams", [True, False])
async def test_the_reason_of_the_end_is_told_in_their_words(
    agent: Agent, answer: Json, expected: Any, streams: bool
) -> None:
    agent.harness.model.answer = lambda request: answer
    agent.harness.model.streams = streams
    plain = await agent.ask(stop_sequences=["END"])
    async with agent.stream(stop_sequences=["END"]) as stream:
        streamed = await stream.get_final_message()
    assert (plain.stop_reason, plain.stop_sequence) == expected
    assert (streamed.stop_reason, streamed.stop_sequence) == expected
    assert [block.type for block in streamed.content] == [block.type for block in plain.content]


async def test_arguments_that_are_no_json_object_reach_the_agent_as_text(agent: Agent) -> None:
    broken = {**CALL, "function": {"name": "add", "arguments": '{"a": '}}
    agent.harness.model.answer = lambda request: {"content": None, "tool_calls": [broken]}
    message = await agent.ask()
    assert message.content[0].input == {"invalid_json": '{"a": '}


async def test_a_tool_call_without_an_id_gets_the_same_one_in_both_ways_of_answering(agent: Agent) -> None:
    nameless = {**CALL, "id": None}
    agent.harness.model.answer = lambda request: {"content": None, "tool_calls": [nameless]}
    plain = await agent.ask()
    async with agent.stream() as stream:
        streamed = await stream.get_final_message()
    assert plain.content[0].id == f"call_{plain.id}_0"
    assert streamed.content[0].id == f"call_{streamed.id}_0"


async def test_a_structured_output_is_asked_for_and_parsed(agent: Agent) -> None:
    class Sum(BaseModel):
        total: int

    agent.harness.model.answer = lambda request: '{"total": 3}'
    message = await agent.client.messages.parse(model="policy", max_tokens=9, messages=HI, output_format=Sum)
    assert message.parsed_output == Sum(total=3)
    assert agent.asked["response_format"]["type"] == "json_schema"
    assert "total" in agent.asked["response_format"]["json_schema"]["schema"]["properties"]
    for blocks in (message.content, [block.model_dump() for block in message.content]):
        await agent.ask(messages=[*HI, {"role": "assistant", "content": blocks}, *HI])
        assert agent.asked["messages"][1] == {"role": "assistant", "content": '{"total": 3}'}


DOCUMENT: Json = {
    "type": "document",
    "source": {"type": "text", "media_type": "text/plain", "data": "Six times seven is 42."},
    "title": "Sums",
    "context": "from a book",
}
PDF: Json = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": PNG}}


@pytest.mark.parametrize("in_result", [False, True])
async def test_documents_of_text_and_results_of_a_search_are_read_as_text(agent: Agent, in_result: bool) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    search = {"type": "search_result", "title": "Found", "source": "http://example.test", "content": parts}
    listed = {"type": "document", "source": {"type": "content", "content": parts}, "citations": {"enabled": False}}
    content: list[Json] = [DOCUMENT, search, listed]
    if in_result:
        call = {"type": "tool_use", "id": "call-1", "name": "search", "input": {}}
        results = [{"type": "tool_result", "tool_use_id": "call-1", "content": content}]
        history: list[Any] = [*HI, {"role": "assistant", "content": [call]}, {"role": "user", "content": results}]
    else:
        history = [{"role": "user", "content": content}]
    await agent.ask(messages=history)
    said = "Sums\n\nfrom a book\n\nSix times seven is 42.\n\nFound\n\nhttp://example.test\n\none\n\ntwo\n\none\n\ntwo"
    assert agent.asked["messages"][-1]["content"] == said


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_prefill_is_gone_on_with_by_engines_that_can(engine: str, streamed: bool) -> None:
    async with GatewayHarness() as harness:
        harness.proxy.update_model_list([harness.model.entry("policy", engine=engine)])
        harness.model.answer = lambda request: "42)"
        agent = Agent(harness, await harness.attempt())
        history: list[Any] = [*HI, {"role": "assistant", "content": "The answer is ("}]
        async with agent.client:
            if streamed:
                async with agent.client.messages.stream(model="policy", max_tokens=9, messages=history) as stream:
                    said = await stream.get_final_message()
            else:
                said = await agent.ask(messages=history)
            await agent.ask()
        assert said.content[0].text == "42)"
        prefilled, plain = (call.request for call in harness.model.calls)
        assert (prefilled["continue_final_message"], prefilled["add_generation_prompt"]) == (True, False)
        assert prefilled["messages"][-1] == {"role": "assistant", "content": "The answer is ("}
        assert "continue_final_message" not in plain
        assert await harness.states(agent.attempt) == ["ok", "ok"]


HARMLESS: Json = {
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "compaction": {"type": "enabled"},
    "container": {"id": "c"},
    "mcp_servers": [],
    "betas": ["some-beta"],
    "inference_geo": "eu",
    "fallbacks": "default",
    "diagnostics": {"previous_message_id": "m"},
    "service_tier": "auto",
}


async def test_what_may_be_left_undone_is_let_pass_and_said_once(
    agent: Agent, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentlightning.llm_proxy.dialects.fields._noted", set())
    tools = [{**TOOL, "defer_loading": True, "cache_control": {"type": "ephemeral"}}, {**TOOL, "defer_loading": True}]
    for _ in range(2):
        await agent.ask(tools=tools, extra_body=HARMLESS, extra_headers={"anthropic-beta": "x"})
    assert [tool["function"]["name"] for tool in agent.asked["tools"]] == ["add", "add"]
    assert not set(HARMLESS) & set(agent.asked)
    for name in ("context_management", "container", "betas", "tools[].defer_loading"):
        assert caplog.text.count(f"field {name!r}") == 1
    for name, value in (("mcp_servers", [{"type": "url"}]), ("container", {"skills": [{"type": "anthropic"}]})):
        with pytest.raises(anthropic.BadRequestError, match="cannot be served"):
            await agent.ask(extra_body={name: value})


async def test_a_reference_to_a_tool_is_its_name(agent: Agent) -> None:
    found = [{"type": "tool_reference", "tool_name": "add"}, {"type": "tool_reference", "tool_name": "multiply"}]
    call = {"type": "tool_use", "id": "call-1", "name": "search", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "call-1", "content": found}
    turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    await agent.ask(messages=[{"role": "user", "content": "hi"}, *turns], tools=[TOOL])
    assert agent.asked["messages"][-1]["content"] == "add\n\nmultiply"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_thought_has_a_signature_and_goes_back_as_it_was(agent: Agent, streamed: bool) -> None:
    agent.harness.model.answer = lambda request: {"reasoning_content": "hm, so be it", "content": "ok"}
    kinds: list[str] = []
    if streamed:
        async with agent.client.messages.stream(model="policy", max_tokens=9, messages=HI) as stream:
            async for event in stream:
                kinds += [event.delta.type] if event.type == "content_block_delta" else []
            first = await stream.get_final_message()
        assert kinds.count("signature_delta") == 1
        assert kinds.index("signature_delta") == kinds.index("text_delta") - 1
    else:
        first = await agent.ask()
    thought, text = first.content
    assert (thought.thinking, text.text) == ("hm, so be it", "ok")
    assert len(thought.signature) > 40
    unknown = {"type": "thinking", "thinking": "hm, so be it", "signature": "made elsewhere"}
    redacted = {"type": "redacted_thinking", "data": "made elsewhere"}
    for content in (first.content, [unknown, text], [redacted, *first.content], [text]):
        history: list[Any] = [*HI, {"role": "assistant", "content": content}, *HI]
        await agent.ask(messages=history)
        thoughts = {} if content == [text] else {"reasoning_content": "hm, so be it"}
        assert agent.asked["messages"][1] == {"role": "assistant", "content": "ok", **thoughts}


async def test_the_models_are_listed_for_this_library_too(agent: Agent) -> None:
    assert [model.id async for model in agent.client.models.list()] == ["policy"]


# --- requests --------------------------------------------------------------------------------------------------------


async def test_a_conversation_with_tools_thoughts_and_images_arrives_as_chat_messages(agent: Agent) -> None:
    agent.harness.model.answer = lambda request: {"reasoning_content": "hm", "content": "ok", "tool_calls": [CALL]}
    first = await agent.ask()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    linked = {"type": "image", "source": {"type": "url", "url": "http://example.test/a.png"}}
    result = {"type": "tool_result", "tool_use_id": "call-1", "content": [{"type": "text", "text": "3"}, image]}
    failed = {"type": "tool_result", "tool_use_id": "call-2", "content": "no such tool", "is_error": True}
    await agent.ask(
        system=[{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}],
        messages=[
            {"role": "user", "content": "what is this?"},
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result, failed, {"type": "text", "text": "and this?"}, linked]},
        ],
    )
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    arguments = CALL["function"]["arguments"]
    assert agent.asked["messages"] == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "what is this?"},
        {
            "role": "assistant",
            "content": "ok",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "call-1", "type": "function", "function": {"name": "add", "arguments": arguments}}],
        },
        {"role": "tool", "tool_call_id": "call-1", "content": [{"type": "text", "text": "3"}, part]},
        {"role": "tool", "tool_call_id": "call-2", "content": "Error: no such tool"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "and this?"},
                {"type": "image_url", "image_url": {"url": "http://example.test/a.png"}},
            ],
        },
    ]


async def test_turns_of_one_role_become_one_as_anthropic_combines_them(agent: Agent) -> None:
    use = {"type": "tool_use", "id": "c", "name": "add", "input": {}}
    await agent.ask(
        messages=[
            {"role": "user", "content": "one"},
            {"role": "user", "content": [{"type": "text", "text": "two"}]},
            {"role": "assistant", "content": "three"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]},
            {"role": "user", "content": "four"},
        ]
    )
    shown = [(message["role"], message["content"]) for message in agent.asked["messages"]]
    assert shown == [("user", "one\n\ntwo"), ("assistant", "three"), ("tool", ""), ("user", "four")]
    assert agent.asked["messages"][1]["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"extra_body": SAMPLING}, SAMPLING),
        ({"stop_sequences": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"metadata": {"user_id": "u"}}, {"user": "u"}),
        (
            {"tools": [TOOL]},
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "add", "description": "sum", "parameters": TOOL["input_schema"]},
                    }
                ]
            },
        ),
        ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
        (
            {"tool_choice": {"type": "tool", "name": "add"}},
            {"tool_choice": {"type": "function", "function": {"name": "add"}}},
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}},
        ),
        (
            {"thinking": {"type": "disabled"}},
            {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}},
        ),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
    ],
)
async def test_each_setting_has_its_place_in_the_chat_request(agent: Agent, fields: Json, expected: Json) -> None:
    await agent.ask(**fields)
    own = {"model": "policy", "max_tokens": 50, "messages": HI, "return_token_ids": True, "logprobs": True}
    assert agent.asked == {**own, **expected}


async def test_counting_tokens_asks_the_engine_and_leaves_no_span(agent: Agent) -> None:
    count = await agent.client.messages.count_tokens(
        model="policy", messages=[*HI, {"role": "assistant", "content": "so"}], system="Be brief.", tools=[TOOL]
    )
    exchange = agent.harness.model.calls[-1]
    assert exchange.path == "/tokenize"
    assert count.input_tokens == len(encode(json.dumps(exchange.request["messages"])))
    assert exchange.request["messages"][0] == {"role": "system", "content": "Be brief."}
    assert exchange.request["tools"][0]["function"]["name"] == "add"
    assert exchange.request["add_generation_prompt"] is False
    assert set(exchange.request) == {"model", "messages", "tools", "add_generation_prompt"}
    assert await agent.harness.spans(agent.attempt) == []


async def test_an_engine_that_does_not_count_is_an_error_that_says_so_and_is_asked_once(
    harness: GatewayHarness,
) -> None:
    harness.model.counts = False
    agent = Agent(harness, await harness.attempt(), max_retries=2)
    async with agent.client:
        with pytest.raises(anthropic.InternalServerError, match="does not count tokens") as caught:
            await agent.client.messages.count_tokens(model="policy", messages=HI)
    assert (caught.value.status_code, caught.value.type) == (501, "api_error")
    assert len(harness.model.calls) == 1


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "error", "kind"),
    [
        (Fault(400), anthropic.BadRequestError, "invalid_request_error"),
        (Fault(401), anthropic.AuthenticationError, "authentication_error"),
        (Fault(403), anthropic.PermissionDeniedError, "permission_error"),
        (Fault(404), anthropic.NotFoundError, "not_found_error"),
        (Fault(413), anthropic.APIStatusError, "request_too_large"),
        (Fault(422), anthropic.UnprocessableEntityError, "invalid_request_error"),
        (Fault(500), anthropic.InternalServerError, "api_error"),
        (Fault(529), anthropic.OverloadedError, "overloaded_error"),
    ],
    ids=lambda value: str(value.status) if isinstance(value, Fault) else "",
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_servers_refusal_is_the_librarys_own_error(
    agent: Agent, fault: Fault, error: Any, kind: str, stream: bool
) -> None:
    agent.harness.model.faults = [fault]
    with pytest.raises(error, match=f"told to answer {fault.status}") as caught:
        await agent.ask(stream=stream)
    assert (caught.value.status_code, caught.value.type) == (fault.status, kind)
    assert await agent.harness.states(agent.attempt) == ["upstream_error"]


async def test_refusals_of_address_attempt_and_key_are_the_librarys_own_errors(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, other = await harness.attempt(), await harness.attempt()
    monkeypatch.setenv("AGL_TOKEN", "s3cret")
    async with GatewayHarness() as guarded:
        known = await guarded.attempt()
        nobody = Agent(guarded, known, api_key="none")
        with pytest.raises(anthropic.AuthenticationError, match="attempt key"):
            await nobody.ask()
        key = guarded.proxy.as_resource(known.rollout_id, known.attempt.attempt_id, "policy").api_key
        own = Agent(guarded, known, api_key=key)
        assert (await own.ask()).content[0].text == "you said hi"
        bearer = Agent(guarded, known, api_key=None, auth_token=key)
        assert (await bearer.ask()).content[0].text == "you said hi"
        strange = Agent(guarded, await guarded.attempt(), api_key=key)
        with pytest.raises(anthropic.PermissionDeniedError, match="another attempt"):
            await strange.ask()
        for made in (nobody, own, bearer, strange):
            await made.client.close()
    for url in (harness.url(attempt, "").replace(attempt.rollout_id, "ro-none"), harness.url(other, "/v2")):
        lost = Agent(harness, attempt, base_url=url)
        with pytest.raises(anthropic.NotFoundError) as caught:
            await lost.ask()
        assert caught.value.type == "not_found_error"
        await lost.client.close()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"extra_body": {"mcp_servers": [{}]}}, "mcp_servers"),
        ({"extra_body": {"max_tokens": "many"}}, "max_tokens"),
        ({"messages": [*HI, {"role": "assistant", "content": "The answer is ("}]}, "messages"),
        ({"messages": [{"role": "user", "content": [PDF]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{**DOCUMENT, "citations": {"enabled": True}}]}]},
            "messages[0].content[0].citations",
        ),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [3]}, "messages[0]"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "input_examples": [{"a": 1}]}]}, "tools[0].input_examples"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"metadata": {"user_id": "u", "plan": "x"}}, "metadata.plan"),
    ],
)
async def test_what_cannot_be_translated_is_a_400_that_names_the_field(agent: Agent, fields: Json, named: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match="invalid_request_error") as caught:
        await agent.ask(**fields)
    assert f"'{named}'" in str(caught.value.api_message)
    assert agent.harness.model.calls == []
    said, call = await agent.recorded()
    assert (call["state"], call["http_status"]) == ("refused", 400)
    assert f"'{named}'" in said["error.message"]


# --- streams ---------------------------------------------------------------------------------------------------------


async def _events(agent: Agent, **fields: Any) -> list[tuple[str, Json]]:
    """Return the events of a stream as they come over the wire."""
    body = {"model": "policy", "max_tokens": 50, "messages": HI, "stream": True, **fields}
    async with agent.harness.session.post(agent.harness.url(agent.attempt, "/v1/messages"), json=body) as reply:
        assert (reply.status, reply.content_type) == (200, "text/event-stream")
        frames = [frame.split("\n") for frame in (await reply.text()).split("\n\n") if frame]
    events = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in frames]
    assert all(name == data["type"] for name, data in events)
    return events


async def test_the_events_of_a_stream_in_their_order_with_their_indices(agent: Agent) -> None:
    answer = {"reasoning_content": "hm so", "content": "a  b", "tool_calls": [CALL, {**CALL, "id": "call-2"}]}
    agent.harness.model.answer = lambda request: answer
    events = await _events(agent)
    empty = {"input_tokens": 0, "output_tokens": 0, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
    first, second = '{"a": 1, "', 'b": "ü"}'
    assert first + second == CALL["function"]["arguments"]

    def block(index: int, start: Json, *deltas: Json) -> list[Json]:
        return [
            {"type": "content_block_start", "index": index, "content_block": start},
            *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
            {"type": "content_block_stop", "index": index},
        ]

    def tool(index: int, name: str) -> list[Json]:
        pieces = [{"type": "input_json_delta", "partial_json": half} for half in _halves(CALL["function"]["arguments"])]
        return block(index, {"type": "tool_use", "id": name, "name": "add", "input": {}}, *pieces)

    assert events[0][1]["message"] == {
        "id": agent.harness.model.calls[0].reply["id"],
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": empty,
    }
    signed = events[4][1]["delta"]
    assert len(signed.pop("signature")) > 40
    thoughts = [{"type": "thinking_delta", "thinking": word} for word in ("hm", " so")] + [{"type": "signature_delta"}]
    texts = [{"type": "text_delta", "text": word} for word in ("a", "  b")]
    used = agent.harness.model.calls[0].reply["usage"]
    counts = {**empty, "input_tokens": used["prompt_tokens"], "output_tokens": used["completion_tokens"]}
    assert [data for _, data in events[1:]] == [
        *block(0, {"type": "thinking", "thinking": "", "signature": ""}, *thoughts),
        *block(1, {"type": "text", "text": ""}, *texts),
        *tool(2, "call-1"),
        *tool(3, "call-2"),
        {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}, "usage": counts},
        {"type": "message_stop"},
    ]


def _halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 2], text[len(text) // 2 :]


@pytest.mark.parametrize("streams", [True, False])
async def test_the_library_puts_a_stream_together_to_the_very_text(agent: Agent, streams: bool) -> None:
    agent.harness.model.streams = streams
    agent.harness.model.answer = lambda request: {"reasoning_content": "a\n\nb", "content": TEXT, "tool_calls": [CALL]}
    async with agent.stream() as stream:
        text = "".join([piece async for piece in stream.text_stream])
        message = await stream.get_final_message()
    assert text == TEXT
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[0].thinking == "a\n\nb"
    assert message.content[2].input == {"a": 1, "b": "ü"}
    said, call = await agent.recorded()
    assert said["gen_ai.completion.0.content"] == TEXT
    assert said["gen_ai.response.id"] == message.id
    assert (call["state"], call["streamed"]) == ("ok", True)
    engine = agent.harness.model.calls[0].reply
    assert engine is not None
    assert call["completion_token_ids"] == engine["choices"][0]["token_ids"]
    assert len(call["completion_logprobs"]) == len(call["completion_token_ids"])


async def test_the_first_words_come_before_the_last_are_made(agent: Agent) -> None:
    agent.harness.model.answer = lambda request: "one two three"
    agent.harness.model.hold_frames(2)
    async with agent.stream() as stream:
        texts = stream.text_stream
        assert await texts.__anext__() == "one"
        assert await agent.harness.raw(agent.attempt) == []
        agent.harness.model.release()
        assert [piece async for piece in texts] == [" two", " three"]
    assert await agent.harness.states(agent.attempt) == ["ok"]


HALF = b'data: {"id": "x", "choices": [{"index": 0, "delta": {"content": "ha"}, "finish_reason": null}]}\n\n'


@pytest.mark.parametrize(
    "fault",
    [
        Fault(body=HALF, headers=SSE),
        Fault(body=HALF + b"data: not json\n\n", headers=SSE),
        Fault(body=HALF + b'data: {"error": {"message": "out of memory"}}\n\n', headers=SSE),
        Fault(body=HALF * 3, headers=SSE, cut="middle"),
    ],
    ids=["ends early", "garbage", "error in the stream", "cut"],
)
async def test_a_stream_that_breaks_is_the_librarys_own_error(agent: Agent, fault: Fault) -> None:
    agent.harness.model.faults = [fault]
    text = ""

    async def read() -> None:
        nonlocal text
        async with agent.stream() as stream:
            async for piece in stream.text_stream:
                text += piece

    with pytest.raises(anthropic.APIStatusError, match="model server"):
        await read()
    assert text.startswith("ha")
    said, call = await agent.recorded()
    assert call["state"] == "upstream_error"
    assert "completion_token_ids" not in call
    assert said["gen_ai.completion.0.content"].startswith("ha")


async def test_a_tool_call_that_goes_on_after_its_end_breaks_the_stream(agent: Agent) -> None:
    def chunk(**delta: Any) -> bytes:
        choices = [{"index": 0, "delta": delta, "finish_reason": None}]
        return b"data: " + json.dumps({"id": "x", "choices": choices}).encode() + b"\n\n"

    def piece(index: int, arguments: str) -> Json:
        return {"index": index, "id": f"c{index}", "function": {"name": "add", "arguments": arguments}}

    body = chunk(tool_calls=[piece(0, "{}")]) + chunk(tool_calls=[piece(1, "{")]) + chunk(tool_calls=[piece(0, "{}")])
    agent.harness.model.faults = [Fault(body=body, headers=SSE)]
    with pytest.raises(anthropic.APIStatusError, match="went back to the tool call"):
        async with agent.stream() as stream:
            await stream.get_final_message()
    assert await agent.harness.states(agent.attempt) == ["upstream_error"]


async def test_an_agent_that_leaves_in_the_middle_leaves_a_span_that_says_so(agent: Agent) -> None:
    agent.harness.model.answer = lambda request: "one two three four"
    agent.harness.model.hold_frames(3)
    async with agent.stream() as stream:
        await stream.text_stream.__anext__()
    await until(lambda: sum(agent.harness.proxy.stats()["calls"].values()) == 1)
    said, call = await agent.recorded()
    assert (call["state"], call["http_status"]) == ("client_left", 499)
    assert said["gen_ai.completion.0.content"].startswith("one")


# --- a server that speaks the dialect itself -------------------------------------------------------------------------


@pytest.fixture
async def native() -> AsyncGenerator[Agent, None]:
    async with GatewayHarness() as harness:
        entry = harness.model.entry("claude", model="anthropic/claude-9", api_key="provider-key")
        harness.proxy.update_model_list([entry])
        made = Agent(harness, await harness.attempt())
        async with made.client:
            yield made


SEARCH = {"type": "web_search_20250305", "name": "web_search"}
BLOCKS = [
    {"type": "thinking", "thinking": "hm so", "signature": "sig"},
    {"type": "text", "text": TEXT},
    {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}},
]


async def test_a_native_server_gets_the_request_as_it_is_with_its_key_in_its_header(native: Agent) -> None:
    headers = {"anthropic-beta": "some-beta", "x-secret": "no"}
    await native.ask(model="claude", tools=[SEARCH], system="s", extra_headers=headers)
    exchange = native.harness.model.calls[0]
    assert exchange.path == "/v1/messages"
    assert exchange.request == {
        "model": "claude-9",
        "max_tokens": 50,
        "messages": HI,
        "system": "s",
        "tools": [SEARCH],
    }
    assert exchange.headers["x-api-key"] == "provider-key"
    assert exchange.headers["anthropic-version"] == native.client.default_headers["anthropic-version"]
    assert exchange.headers["anthropic-beta"] == "some-beta"
    assert "authorization" not in exchange.headers
    assert "x-secret" not in exchange.headers
    body = {"model": "claude", "max_tokens": 9, "messages": HI}
    await native.harness.post(native.harness.url(native.attempt, "/v1/messages"), body)
    assert native.harness.model.calls[1].headers["anthropic-version"] == "2023-06-01"


@pytest.mark.parametrize("streams", [True, False])
async def test_a_native_reply_passes_and_is_recorded_without_tokens(native: Agent, streams: bool) -> None:
    native.harness.model.streams = streams
    native.harness.model.answer = lambda request: {"content": BLOCKS, "stop_reason": "tool_use"}
    async with native.stream(model="claude") as stream:
        message = await stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert (message.content[0].signature, message.content[1].text) == ("sig", TEXT)
    assert message.content[2].input == {"a": 1}
    said, call = await native.recorded()
    assert (call["state"], call["finish_reason"]) == ("no_tokens", "tool_calls")
    assert said["gen_ai.response.id"] == message.id
    assert said["gen_ai.prompt.0.content"] == "hi"
    assert said["gen_ai.completion.0.content"] == TEXT
    assert said["gen_ai.completion.0.reasoning_content"] == "hm so"
    assert json.loads(said["gen_ai.completion.0.tool_calls.0.arguments"]) == {"a": 1}
    assert (said["gen_ai.usage.prompt_tokens"], said["gen_ai.usage.completion_tokens"]) == (9, 5)


async def test_a_native_stream_passes_frame_by_frame(native: Agent) -> None:
    body = {"model": "claude", "max_tokens": 9, "messages": HI, "stream": True}
    async with native.harness.session.post(native.harness.url(native.attempt, "/v1/messages"), json=body) as reply:
        through = await reply.read()
    url = f"{native.harness.model.base_url}/messages"
    async with native.harness.session.post(url, json={**body, "model": "claude-9"}) as reply:
        direct = await reply.read()
    first, second = (exchange.reply["id"].encode() for exchange in native.harness.model.calls)
    assert through.replace(first, second) == direct


async def test_a_native_servers_own_error_is_heard(native: Agent) -> None:
    said = {"type": "error", "error": {"type": "billing_error", "message": "pay first"}, "request_id": "req_1"}
    native.harness.model.faults = [Fault(402, json.dumps(said).encode())]
    with pytest.raises(anthropic.APIStatusError) as caught:
        await native.ask(model="claude")
    assert caught.value.body == said
    broken = b"event: error\ndata: " + json.dumps(said).encode() + b"\n\n"
    begun = b'event: message_start\ndata: {"type": "message_start", "message": {"id": "m", "usage": {}}}\n\n'
    native.harness.model.faults = [Fault(body=begun + broken, headers=SSE)]
    with pytest.raises(anthropic.APIStatusError) as caught:
        async for _ in await native.ask(model="claude", stream=True):
            pass
    assert caught.value.body == said
    assert await native.harness.states(native.attempt) == ["upstream_error", "upstream_error"]


async def test_a_native_stream_that_ends_early_is_an_error(native: Agent) -> None:
    begun = b'event: message_start\ndata: {"type": "message_start", "message": {"id": "m", "usage": {}}}\n\n'
    native.harness.model.faults = [Fault(body=begun, headers=SSE)]
    with pytest.raises(anthropic.APIStatusError, match="before the reply was complete"):
        async for _ in await native.ask(model="claude", stream=True):
            pass
    said, call = await native.recorded()
    assert (call["state"], said["gen_ai.response.id"]) == ("upstream_error", "m")


async def test_a_native_server_counts_tokens_itself(native: Agent) -> None:
    count = await native.client.messages.count_tokens(model="claude", messages=HI, tools=[SEARCH])
    exchange = native.harness.model.calls[0]
    assert exchange.path == "/v1/messages/count_tokens"
    assert count.input_tokens == len(encode(json.dumps(HI)))
    assert exchange.request == {"model": "claude-9", "messages": HI, "tools": [SEARCH]}


async def test_a_server_of_messages_only_is_asked_in_no_other_dialect(native: Agent) -> None:
    status, body = await native.harness.ask(native.attempt, model="claude")
    assert status == 400
    assert "served by messages only, not by chat/completions" in body["error"]["message"]
    assert native.harness.model.calls == []


async def test_the_dialects_of_a_server_may_be_listed(harness: GatewayHarness) -> None:
    both = harness.model.entry("both", dialects=["chat/completions", "messages"])
    harness.proxy.update_model_list([both])
    agent = Agent(harness, await harness.attempt())
    async with agent.client:
        await agent.ask(model="both")
        assert (await harness.ask(agent.attempt, model="both"))[0] == 200
    assert [exchange.path for exchange in harness.model.calls] == ["/v1/messages", "/v1/chat/completions"]
    with pytest.raises(ValueError, match=r"dialects must be a list out of .*messages; got \['smoke signs'\]"):
        harness.proxy.update_model_list([harness.model.entry("m", dialects=["smoke signs"])])
