"""Anthropic's messages through the gateway, with their own client library: its replies, and the records."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

from tests.llm_proxy.agents import Agent, MessagesAgent
from tests.llm_proxy.harness import HI, GatewayHarness
from tests.stubs.model_server import Fault, encode

Json = dict[str, Any]
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "top_k": 3}  # of API version 2023-06-01, which the library left behind
SSE = {"Content-Type": "text/event-stream"}
PNG = "iVBORw0KGgo="
TOOL = {
    "name": "add",
    "description": "sum",
    "input_schema": {"type": "object", "properties": {"a": {"type": "number"}}},
}
CALL = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "ü"}'}}
TEXT = "Two  spaces\n\n    and a block:\n```python\nx = 'e\u0301 \U0001f600'\n```"


AGENT = MessagesAgent


# --- replies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("streamed", "streams"), [(False, True), (True, True), (True, False)])
async def test_thoughts_words_and_tool_calls_are_blocks_in_this_order_to_the_very_text(
    agent: Agent, streamed: bool, streams: bool
) -> None:
    answer = {"reasoning_content": "let me\n\nsee", "content": TEXT, "tool_calls": [CALL]}
    agent.harness.model.answer, agent.harness.model.streams = lambda request: answer, streams
    message = await agent.whole(streamed, tools=[TOOL])
    thought, text, tool = message.content
    assert (thought.thinking, text.text, message.stop_reason) == ("let me\n\nsee", TEXT, "tool_use")
    engine = agent.harness.model.calls[0].reply
    counts = (engine["usage"]["prompt_tokens"], engine["usage"]["completion_tokens"])
    assert (message.role, message.model) == ("assistant", "policy")
    assert (message.usage.input_tokens, message.usage.output_tokens) == counts
    assert (tool.id, tool.name, tool.input) == ("call-1", "add", {"a": 1, "b": "ü"})
    attributes, call = await agent.recorded()
    assert (attributes["gen_ai.response.id"], attributes["gen_ai.completion.0.content"]) == (message.id, TEXT)
    assert attributes["gen_ai.completion.0.reasoning_content"] == "let me\n\nsee"
    assert attributes["gen_ai.completion.0.tool_calls.0.arguments"] == '{"a": 1, "b": "ü"}'
    assert attributes["llm.request.functions.0.name"] == "add"
    assert (call["state"], call["streamed"]) == ("ok", streamed)
    assert call["completion_token_ids"] == agent.harness.model.calls[0].reply["choices"][0]["token_ids"]
    assert len(call["completion_logprobs"]) == len(call["completion_token_ids"])


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
    plain, streamed = [await agent.whole(streamed, stop_sequences=["END"]) for streamed in (False, True)]
    assert [(message.stop_reason, message.stop_sequence) for message in (plain, streamed)] == [expected] * 2
    assert [block.type for block in streamed.content] == [block.type for block in plain.content]


async def test_a_broken_tool_call_reaches_the_agent_as_text_and_without_an_id_gets_one(agent: Agent) -> None:
    broken = {**CALL, "id": None, "function": {"name": "add", "arguments": '{"a": '}}
    agent.harness.model.answer = lambda request: {"content": None, "tool_calls": [broken]}
    plain = await agent.ask()
    assert plain.content[0].input == {"invalid_json": '{"a": '}
    agent.harness.model.answer = lambda request: {"content": None, "tool_calls": [{**CALL, "id": None}]}
    for message in (plain, await agent.whole(streamed=True)):
        assert message.content[0].id == f"call_{message.id}_0"


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
async def test_documents_searches_and_references_to_tools_are_read_as_text(agent: Agent, in_result: bool) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    search = {"type": "search_result", "title": "Found", "source": "http://example.test", "content": parts}
    listed = {"type": "document", "source": {"type": "content", "content": parts}, "citations": {"enabled": False}}
    content: list[Json] = [DOCUMENT, search, listed]
    expected = (
        "Sums\n\nfrom a book\n\nSix times seven is 42.\n\nFound\n\nhttp://example.test\n\none\n\ntwo\n\none\n\ntwo"
    )
    history: list[Any] = [{"role": "user", "content": content}]
    if in_result:
        content.append({"type": "tool_reference", "tool_name": "add"})
        expected += "\n\nadd"
        call = {"type": "tool_use", "id": "call-1", "name": "search", "input": {}}
        results = [{"type": "tool_result", "tool_use_id": "call-1", "content": content}]
        history = [*HI, {"role": "assistant", "content": [call]}, {"role": "user", "content": results}]
    await agent.ask(messages=history)
    assert agent.asked["messages"][-1]["content"] == expected


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_prefill_is_gone_on_with_by_engines_that_can(agent: Agent, engine: str, streamed: bool) -> None:
    agent.harness.proxy.update_model_list([agent.harness.model.entry("policy", engine=engine)])
    agent.harness.model.answer = lambda request: "42)"
    history: list[Any] = [*HI, {"role": "assistant", "content": "The answer is ("}]
    assert (await agent.whole(streamed, messages=history)).content[0].text == "42)"
    await agent.ask()
    prefilled, plain = (call.request for call in agent.harness.model.calls)
    assert (prefilled["continue_final_message"], prefilled["add_generation_prompt"]) == (True, False)
    assert prefilled["messages"][-1] == {"role": "assistant", "content": "The answer is ("}
    assert "continue_final_message" not in plain
    assert await agent.harness.states() == ["ok", "ok"]


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
    monkeypatch.setattr("agentlightning.llm_proxy.dialects.translation._noted", set())
    tools = [{**TOOL, "defer_loading": True, "cache_control": {"type": "ephemeral"}}, {**TOOL, "defer_loading": True}]
    for _ in range(2):
        await agent.ask(tools=tools, extra_body=HARMLESS, extra_headers={"anthropic-beta": "x"})
    assert [tool["function"]["name"] for tool in agent.asked["tools"]] == ["add", "add"]
    assert not set(HARMLESS) & set(agent.asked)
    for name in ("context_management", "container", "betas", "tools[].defer_loading"):
        assert caplog.text.count(f"field {name!r}") == 1
    for name, value in (("mcp_servers", [{"type": "url"}]), ("container", {"skills": [{"type": "anthropic"}]})):
        with pytest.raises(anthropic.BadRequestError, match="is not supported"):
            await agent.ask(extra_body={name: value})
    with pytest.raises(anthropic.BadRequestError, match="Send the complete conversation"):
        await agent.ask(extra_body={"thread": {"id": "t"}})


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_thought_has_a_signature_and_goes_back_as_it_was(agent: Agent, streamed: bool) -> None:
    agent.harness.model.answer = lambda request: {"reasoning_content": "hm, so be it", "content": "ok"}
    first = await agent.whole(streamed)
    thought, text = first.content
    assert (thought.thinking, text.text) == ("hm, so be it", "ok")
    assert len(thought.signature) > 40
    unknown = {"type": "thinking", "thinking": "hm, so be it", "signature": "made elsewhere"}
    redacted = {"type": "redacted_thinking", "data": "made elsewhere"}
    for content in (first.content, [unknown, text], [redacted, *first.content], [text]):
        await agent.ask(messages=[*HI, {"role": "assistant", "content": content}, *HI])
        thoughts = {} if content == [text] else {"reasoning_content": "hm, so be it"}
        assert agent.asked["messages"][1] == {"role": "assistant", "content": "ok", **thoughts}


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
    assert await agent.harness.spans() == []


async def test_an_engine_that_does_not_count_is_an_error_that_says_so_and_is_asked_once(agent: Agent) -> None:
    agent.harness.model.counts = False
    with pytest.raises(anthropic.InternalServerError, match="cannot count tokens") as caught:
        await agent.client.with_options(max_retries=2).messages.count_tokens(model="policy", messages=HI)
    assert (caught.value.status_code, caught.value.type) == (501, "api_error")
    assert len(agent.harness.model.calls) == 1


# --- errors ----------------------------------------------------------------------------------------------------------


async def test_an_unknown_address_or_rollout_is_the_librarys_own_error(agent: Agent) -> None:
    right = agent.harness.url("")
    for url in (right.replace(agent.attempt.rollout_id, "ro-none"), agent.harness.url("/v2")):
        with pytest.raises(anthropic.NotFoundError) as caught:
            await agent.client.with_options(base_url=url).messages.create(model="policy", **agent.defaults)
        assert caught.value.type == "not_found_error"


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
    attributes, call = await agent.recorded()
    assert (call["state"], call["http_status"]) == ("refused", 400)
    assert f"'{named}'" in attributes["error.message"]


# --- streams ---------------------------------------------------------------------------------------------------------


async def test_the_events_of_a_stream_in_their_order_with_their_indices(agent: Agent) -> None:
    answer = {"reasoning_content": "hm so", "content": "a  b", "tool_calls": [CALL, {**CALL, "id": "call-2"}]}
    agent.harness.model.answer = lambda request: answer
    events = await agent.wire_events()
    empty = {"input_tokens": 0, "output_tokens": 0, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
    arguments = CALL["function"]["arguments"]
    halves = arguments[: len(arguments) // 2], arguments[len(arguments) // 2 :]

    def block(index: int, start: Json, *deltas: Json) -> list[Json]:
        return [
            {"type": "content_block_start", "index": index, "content_block": start},
            *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
            {"type": "content_block_stop", "index": index},
        ]

    def tool(index: int, name: str, *texts: str) -> list[Json]:
        pieces = [{"type": "input_json_delta", "partial_json": text} for text in texts]
        return block(index, {"type": "tool_use", "id": name, "name": "add", "input": {}}, *pieces)

    assert events[0]["message"] == {
        "id": agent.harness.model.calls[0].reply["id"],
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": empty,
    }
    signed = events[4]["delta"]
    assert len(signed.pop("signature")) > 40
    thoughts = [{"type": "thinking_delta", "thinking": word} for word in ("hm", " so")] + [{"type": "signature_delta"}]
    texts = [{"type": "text_delta", "text": word} for word in ("a", "  b")]
    used = agent.harness.model.calls[0].reply["usage"]
    counts = {**empty, "input_tokens": used["prompt_tokens"], "output_tokens": used["completion_tokens"]}
    assert events[1:] == [
        *block(0, {"type": "thinking", "thinking": "", "signature": ""}, *thoughts),
        *block(1, {"type": "text", "text": ""}, *texts),
        *tool(2, "call-1", *halves),
        *tool(3, "call-2", arguments),
        {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}, "usage": counts},
        {"type": "message_stop"},
    ]


async def test_a_tool_call_that_goes_on_after_its_end_breaks_the_stream(agent: Agent) -> None:
    def piece(**delta: Any) -> bytes:
        choices = [{"index": 0, "delta": delta, "finish_reason": None}]
        return b"data: " + json.dumps({"id": "x", "choices": choices}).encode() + b"\n\n"

    call = piece(tool_calls=[{"index": 0, "id": "c0", "function": {"name": "add", "arguments": "{}"}}])
    agent.harness.model.faults = [Fault(body=call + piece(content="So") + call, headers=SSE)]
    with pytest.raises(anthropic.APIStatusError, match="continued the tool call"):
        await agent.whole(streamed=True)
    assert await agent.harness.states() == ["upstream_error"]


# --- a server that speaks the dialect itself -------------------------------------------------------------------------


@pytest.fixture
async def native(harness: GatewayHarness) -> AsyncGenerator[Agent, None]:
    harness.proxy.update_model_list([harness.model.entry("claude", model="anthropic/claude-9", api_key="provider-key")])
    made = MessagesAgent(harness)
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
    await native.harness.post("/v1/messages", body)
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
    attributes, call = await native.recorded()
    assert (call["state"], call["finish_reason"]) == ("no_tokens", "tool_calls")
    assert attributes["gen_ai.response.id"] == message.id
    assert attributes["gen_ai.prompt.0.content"] == "hi"
    assert attributes["gen_ai.completion.0.content"] == TEXT
    assert attributes["gen_ai.completion.0.reasoning_content"] == "hm so"
    assert json.loads(attributes["gen_ai.completion.0.tool_calls.0.arguments"]) == {"a": 1}
    assert (attributes["gen_ai.usage.prompt_tokens"], attributes["gen_ai.usage.completion_tokens"]) == (9, 5)


BEGUN = b'event: message_start\ndata: {"type": "message_start", "message": {"id": "m", "usage": {}}}\n\n'


async def test_a_native_servers_own_error_is_heard(native: Agent) -> None:
    error_body = {"type": "error", "error": {"type": "billing_error", "message": "pay first"}, "request_id": "req_1"}
    raw = json.dumps(error_body).encode()
    faults = [Fault(402, raw), Fault(body=BEGUN + b"event: error\ndata: " + raw + b"\n\n", headers=SSE)]
    for streamed, fault in enumerate(faults):
        native.harness.model.faults = [fault]
        with pytest.raises(anthropic.APIStatusError) as caught:
            await native.whole(bool(streamed), model="claude")
        assert caught.value.body == error_body
    assert await native.harness.states() == ["upstream_error", "upstream_error"]


async def test_a_native_stream_that_ends_early_is_an_error(native: Agent) -> None:
    native.harness.model.faults = [Fault(body=BEGUN, headers=SSE)]
    with pytest.raises(anthropic.APIStatusError, match="before the reply was complete"):
        await native.whole(streamed=True, model="claude")
    attributes, call = await native.recorded()
    assert (call["state"], attributes["gen_ai.response.id"]) == ("upstream_error", "m")


async def test_a_native_server_counts_tokens_itself(native: Agent) -> None:
    count = await native.client.messages.count_tokens(model="claude", messages=HI, tools=[SEARCH])
    exchange = native.harness.model.calls[0]
    assert exchange.path == "/v1/messages/count_tokens"
    assert count.input_tokens == len(encode(json.dumps(HI)))
    assert exchange.request == {"model": "claude-9", "messages": HI, "tools": [SEARCH]}


async def test_a_server_of_messages_only_is_asked_in_no_other_dialect(native: Agent) -> None:
    status, body = await native.harness.ask(model="claude")
    assert status == 400
    assert "does not support chat/completions, only messages" in body["error"]["message"]
    assert native.harness.model.calls == []


async def test_the_dialects_of_a_server_may_be_listed(agent: Agent) -> None:
    harness = agent.harness
    harness.proxy.update_model_list([harness.model.entry("both", dialects=["chat/completions", "messages"])])
    await agent.ask(model="both")
    assert (await harness.ask(model="both"))[0] == 200
    assert [exchange.path for exchange in harness.model.calls] == ["/v1/messages", "/v1/chat/completions"]
    with pytest.raises(ValueError, match=r"dialects must be a list of .*messages; got \['smoke signs'\]"):
        harness.proxy.update_model_list([harness.model.entry("m", dialects=["smoke signs"])])
