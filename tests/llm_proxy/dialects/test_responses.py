"""OpenAI's responses through the gateway, with their own client library: its replies, and the records."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from agentlightning.llm_proxy.dialects.responses import sealed
from tests.llm_proxy.agents import Agent, ResponsesAgent
from tests.llm_proxy.harness import GatewayHarness
from tests.stubs.model_server import Fault, encode

Json = dict[str, Any]
SSE = {"Content-Type": "text/event-stream"}
TOOL = {"type": "function", "name": "add", "description": "sum", "parameters": {"type": "object"}, "strict": False}
ARGUMENTS = '{"a": 1, "b": "ü"}'
CALL = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
TEXT = "Two  spaces\n\n    and a block:\n```python\nx = 'e\u0301 \U0001f600'\n```"


AGENT = ResponsesAgent


# --- replies ---------------------------------------------------------------------------------------------------------


async def test_a_response_repeats_what_was_asked_and_counts(agent: Agent) -> None:
    response = await agent.ask(input="hi there", instructions="Be brief.", metadata={"k": "v"})
    assert (response.status, response.model, response.store) == ("completed", "policy", True)
    assert (response.instructions, response.metadata) == ("Be brief.", {"k": "v"})
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (7, 4, 11)
    attributes, call = await agent.recorded()
    assert [attributes[f"gen_ai.prompt.{i}.content"] for i in (0, 1)] == ["Be brief.", "hi there"]
    assert call["prompt_token_ids"] == encode("system Be brief. user hi there assistant")


@pytest.mark.parametrize(("streamed", "streams"), [(False, True), (True, True), (True, False)])
async def test_thoughts_words_and_tool_calls_are_items_in_this_order_to_the_very_text(
    agent: Agent, streamed: bool, streams: bool
) -> None:
    answer = {"reasoning_content": "let me\n\nsee", "content": TEXT, "tool_calls": [CALL]}
    agent.harness.model.answer, agent.harness.model.streams = lambda request: answer, streams
    response = await agent.whole(streamed, tools=[TOOL])
    thought, message, call = response.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "let me\n\nsee")
    assert message.content[0].text == response.output_text == TEXT
    assert (call.call_id, call.name, call.arguments) == ("call-1", "add", ARGUMENTS)
    assert len({item.id for item in response.output}) == 3
    attributes, record = await agent.recorded()
    assert (attributes["gen_ai.response.id"], attributes["gen_ai.completion.0.content"]) == (response.id, TEXT)
    assert attributes["gen_ai.completion.0.tool_calls.0.arguments"] == ARGUMENTS
    assert attributes["llm.request.functions.0.name"] == "add"
    assert (record["state"], record["streamed"]) == ("ok", streamed)
    engine = agent.harness.model.calls[0].reply
    assert record["completion_token_ids"] == engine["choices"][0]["token_ids"]
    assert response.usage.output_tokens == engine["usage"]["completion_tokens"]


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(
    ("finish_reason", "status", "why"),
    [
        ("stop", "completed", None),
        ("length", "incomplete", "max_output_tokens"),
        ("content_filter", "incomplete", "content_filter"),
    ],
)
async def test_a_reply_that_was_cut_is_incomplete_with_the_reason(
    agent: Agent, finish_reason: str, status: str, why: str | None, streams: bool
) -> None:
    agent.harness.model.answer = lambda request: {"content": "so far", "finish_reason": finish_reason}
    agent.harness.model.streams = streams
    plain = await agent.ask()
    last: Any = None
    async for event in await agent.ask(stream=True):
        last = event
    assert last.type == f"response.{status}"
    for response in (plain, last.response):
        assert (response.status, response.output_text, response.output[-1].status) == (status, "so far", status)
        assert (response.incomplete_details and response.incomplete_details.reason) == why


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_refusal_is_a_part_of_its_own_and_an_answer_without_words_an_empty_message(
    agent: Agent, streamed: bool
) -> None:
    agent.harness.model.answer = lambda request: {"content": None, "refusal": "I will not"}
    assert (await agent.whole(streamed)).output[0].content[0].refusal == "I will not"
    agent.harness.model.answer = lambda request: ""
    response = await agent.whole(streamed)
    assert (response.output_text, [item.type for item in response.output]) == ("", ["message"])


class Sum(BaseModel):
    total: int


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_structured_output_is_asked_for_and_parsed(agent: Agent, streamed: bool) -> None:
    agent.harness.model.answer = lambda request: '{"total": 3}'
    if streamed:
        response = await agent.whole(streamed, text_format=Sum)
    else:
        response = await agent.client.responses.parse(model="policy", input="hi", text_format=Sum)
    assert response.output_parsed == Sum(total=3)
    response_format = agent.asked["response_format"]
    schema = response_format["json_schema"]
    assert (response_format["type"], schema["name"], schema["strict"]) == ("json_schema", "Sum", True)
    assert "total" in schema["schema"]["properties"]


# --- requests --------------------------------------------------------------------------------------------------------


async def test_a_tool_is_called_and_its_output_goes_back_with_the_thoughts_before_it(agent: Agent) -> None:
    answer = {"reasoning_content": "hm", "content": "one moment", "tool_calls": [CALL, {**CALL, "id": "call-2"}]}
    agent.harness.model.answer = lambda request: answer
    first = await agent.ask(tools=[TOOL])
    outputs = [{"type": "function_call_output", "call_id": name, "output": "3"} for name in ("call-1", "call-2")]
    await agent.ask(input=[{"role": "user", "content": "1 and 1"}, *first.output, *outputs], tools=[TOOL])
    function = {"name": "add", "arguments": ARGUMENTS}
    assert agent.asked["messages"] == [
        {"role": "user", "content": "1 and 1"},
        {
            "role": "assistant",
            "content": "one moment",
            "reasoning_content": "hm",
            "tool_calls": [{"id": name, "type": "function", "function": function} for name in ("call-1", "call-2")],
        },
        {"role": "tool", "tool_call_id": "call-1", "content": "3"},
        {"role": "tool", "tool_call_id": "call-2", "content": "3"},
    ]
    parameters = {"name": "add", "description": "sum", "parameters": {"type": "object"}, "strict": False}
    assert agent.asked["tools"] == [{"type": "function", "function": parameters}]


async def test_what_codex_adds_to_its_items_is_left_out(agent: Agent) -> None:
    more = {"internal_chat_message_metadata_passthrough": {"source": "codex"}}
    kinds = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "1"},
    ]
    await agent.ask(input=[{"type": "message", **item, **more} for item in kinds])
    assert agent.asked["messages"] == kinds


async def test_what_the_library_has_parsed_goes_back_in_any_form(agent: Agent) -> None:
    agent.harness.model.answer = lambda request: {"content": '{"total": 3}', "tool_calls": [CALL]}
    async with agent.stream(text_format=Sum, tools=[{**TOOL, "strict": True}]) as stream:
        first = await stream.get_final_response()
    assert first.output_parsed == Sum(total=3)
    output = {"type": "function_call_output", "call_id": "call-1", "output": "3"}
    for items in (first.output, [item.model_dump() for item in first.output]):
        await agent.ask(input=[{"role": "user", "content": "hi"}, *items, output])
        turn = agent.asked["messages"][1]
        assert (turn["content"], turn["tool_calls"][0]["function"]["arguments"]) == ('{"total": 3}', ARGUMENTS)


async def test_images_roles_and_parts_arrive_as_chat_messages(agent: Agent) -> None:
    url = "data:image/png;base64,iVBORw0KGgo="
    image = {"type": "input_image", "image_url": url, "detail": "low"}
    text = {"type": "input_text", "text": "what is this?"}
    await agent.ask(
        input=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [text, image]},
            {"role": "assistant", "content": "a dot"},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [text, image]},
            {"role": "user", "content": [text, text]},
        ]
    )
    parts = [
        {"type": "text", "text": "what is this?"},
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
    ]
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    assert agent.asked["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "a dot", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": parts},
        {"role": "user", "content": "what is this?what is this?"},
    ]


async def test_thoughts_of_another_server_are_read_from_their_content_else_from_their_summary(agent: Agent) -> None:
    both = {
        "content": [{"type": "reasoning_text", "text": "whole"}],
        "summary": [{"type": "summary_text", "text": "s"}],
    }
    only = {"summary": [{"type": "summary_text", "text": "short"}]}
    for thoughts, expected in ((both, "whole"), (only, "short")):
        await agent.ask(input=[{"role": "user", "content": "hi"}, {"type": "reasoning", "id": "rs", **thoughts}])
        assert agent.asked["messages"][1]["reasoning_content"] == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0.5, "top_p": 0.9, "user": "u"}, {"temperature": 0.5, "top_p": 0.9, "user": "u"}),
        ({"max_output_tokens": 9}, {"max_tokens": 9}),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        ({"text": {"verbosity": "low"}}, {"verbosity": "low"}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        ({"tool_choice": "required"}, {"tool_choice": "required"}),
        (
            {"tool_choice": {"type": "function", "name": "add"}},
            {"tool_choice": {"type": "function", "function": {"name": "add"}}},
        ),
        ({"parallel_tool_calls": False}, {}),
        ({"include": ["reasoning.encrypted_content"], "store": False, "truncation": "disabled"}, {}),
    ],
)
async def test_each_setting_has_its_place_in_the_chat_request(agent: Agent, fields: Json, expected: Json) -> None:
    await agent.ask(**fields)
    messages = [{"role": "user", "content": "hi"}]
    own = {"model": "policy", "messages": messages, "return_token_ids": True, "logprobs": True}
    assert agent.asked == {**own, **expected}


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_thought_that_is_kept_in_its_opaque_form_alone_goes_back_as_it_was(
    agent: Agent, streamed: bool
) -> None:
    agent.harness.model.answer = lambda request: {"reasoning_content": "hm \u00fc  \U0001f600 so", "content": "ok"}
    fields: Json = {"store": False, "include": ["reasoning.encrypted_content"]}
    if streamed:
        done: list[Json] = []
        async for event in await agent.ask(stream=True, **fields):
            done += [event.item.to_dict()] if event.type == "response.output_item.done" else []
        thought = done[0]
    else:
        thought = (await agent.ask(**fields)).output[0].to_dict()
    bare = {"type": "reasoning", "id": thought["id"], "summary": [], "encrypted_content": thought["encrypted_content"]}
    reply = {"role": "assistant", "content": "ok"}
    for form in (thought, bare, {**bare, "summary": [{"type": "summary_text", "text": "short"}]}):
        await agent.ask(input=[{"role": "user", "content": "hi"}, form, reply], store=False)
        assert agent.asked["messages"][1] == {**reply, "reasoning_content": "hm \u00fc  \U0001f600 so"}
    calls = len(agent.harness.model.calls)
    changed = bare["encrypted_content"][:-6] + "AAAAAA"
    for value in (changed, "\u00fc", "AAAA", bare["encrypted_content"][:-4]):
        with pytest.raises(openai.BadRequestError) as caught:
            await agent.ask(input=[{**bare, "encrypted_content": value}, reply])
        assert (caught.value.code, caught.value.param) == (
            "invalid_encrypted_content",
            "input[0].encrypted_content",
        )
    assert len(agent.harness.model.calls) == calls


async def test_what_may_be_left_undone_is_let_pass_and_said_once(
    agent: Agent, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentlightning.llm_proxy.dialects.translation._noted", set())
    fields: Json = {
        "truncation": "auto",
        "context_management": [{"type": "compaction", "compact_threshold": 1000}],
        "service_tier": "flex",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "metadata": {"k": "v"},
        "user": "u",
        "text": {"verbosity": "low"},
        "tools": [{**TOOL, "defer_loading": True}],
        "extra_body": {"client_metadata": {"k": "v"}},
    }
    for _ in range(2):
        response = await agent.ask(**fields)
    assert response.metadata == {"k": "v"}
    assert not {"truncation", "context_management", "service_tier", "client_metadata"} & set(agent.asked)
    for name in ("truncation", "context_management", "client_metadata", "tools[].defer_loading"):
        assert caplog.text.count(f"field {name!r}") == 1


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_of_allowed_tools_the_model_sees_no_others(agent: Agent, mode: str) -> None:
    other = {**TOOL, "name": "other"}
    allowed = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "other"}]}
    await agent.ask(tools=[TOOL, other], tool_choice=allowed)
    assert [tool["function"]["name"] for tool in agent.asked["tools"]] == ["other"]
    assert agent.asked["tool_choice"] == mode


@pytest.mark.parametrize("streamed", [False, True])
async def test_functions_of_a_namespace_are_flat_for_the_model_and_named_in_full_for_the_agent(
    agent: Agent, streamed: bool
) -> None:
    called = {"id": "call-1", "type": "function", "function": {"name": "files__add", "arguments": ARGUMENTS}}
    agent.harness.model.answer = lambda request: {"content": None, "tool_calls": [called]}
    tools = [{"type": "web_search"}, {"type": "namespace", "name": "files", "description": "d", "tools": [TOOL]}, TOOL]
    earlier = {"type": "function_call", "call_id": "c", "namespace": "files", "name": "add", "arguments": "{}"}
    conversation = [earlier, {"type": "function_call_output", "call_id": "c", "output": "3"}]
    if streamed:
        done = [e async for e in await agent.ask(input=conversation, tools=tools, stream=True)]
        (call,) = done[-1].response.output
        (item,) = [event.item for event in done if event.type == "response.output_item.done"]
        assert (item.namespace, item.name) == ("files", "add")
    else:
        (call,) = (await agent.ask(input=conversation, tools=tools)).output
    assert (call.namespace, call.name, call.arguments) == ("files", "add", ARGUMENTS)
    assert [tool["function"]["name"] for tool in agent.asked["tools"]] == ["files__add", "add"]
    assert agent.asked["messages"][0]["tool_calls"][0]["function"]["name"] == "files__add"


PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Apply a patch.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
DIFF = '*** Begin "Patch" ü\n+x\n'


def custom_call(arguments: str, name: str = "patch") -> Json:
    return {
        "content": None,
        "tool_calls": [{"id": "c-1", "type": "function", "function": {"name": name, "arguments": arguments}}],
    }


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_custom_tool_is_a_function_with_one_text_for_the_model(agent: Agent, streamed: bool) -> None:
    arguments = json.dumps({"input": DIFF}, ensure_ascii=False)
    agent.harness.model.answer = lambda request: custom_call(arguments)
    first: Json = {"input": "go", "tools": [TOOL, PATCH], "tool_choice": {"type": "custom", "name": "patch"}}
    if streamed:
        events = [event async for event in await agent.ask(**first, stream=True)]
        kinds = ("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done")
        assert [event.type for event in events[2:-1]] == [f"response.{kind}" for kind in kinds]
        added, delta, done = events[2:5]
        assert (added.item.type, added.item.input) == ("custom_tool_call", "")
        assert (delta.delta, done.input, done.item_id) == (DIFF, DIFF, added.item.id)
        response = events[-1].response
    else:
        response = await agent.ask(**first)
    (call,) = response.output
    assert (call.type, call.call_id, call.name, call.input) == ("custom_tool_call", "c-1", "patch", DIFF)
    text = {"type": "string", "description": "Text that follows this lark grammar:\nstart: /.+/"}
    shown = agent.asked["tools"][1]["function"]
    assert (shown["name"], shown["description"]) == ("patch", "Apply a patch.")
    assert shown["parameters"]["properties"] == {"input": text}
    assert agent.asked["tool_choice"] == {"type": "function", "function": {"name": "patch"}}

    result = {"type": "custom_tool_call_output", "call_id": "c-1", "output": "done"}
    agent.harness.model.answer = lambda request: "It is made."
    await agent.ask(input=[result], tools=[TOOL, PATCH], previous_response_id=response.id)
    _, turn, tool = agent.asked["messages"]
    assert turn["tool_calls"][0]["function"] == {"name": "patch", "arguments": arguments}
    assert (tool["role"], tool["tool_call_id"], tool["content"]) == ("tool", "c-1", "done")
    echoed = [{"role": "user", "content": "go"}, call.model_dump(exclude_none=True), result]
    before = agent.asked["messages"]
    await agent.ask(input=echoed, tools=[TOOL, PATCH])
    assert agent.asked["messages"] == before


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("arguments", ['{"input": "cut', "plain text", '{"other": "x"}', '{"input": 3}', ""])
async def test_a_custom_call_of_another_form_comes_as_the_model_wrote_it(
    agent: Agent, arguments: str, streamed: bool
) -> None:
    agent.harness.model.answer = lambda request: custom_call(arguments)
    if streamed:
        response = [event async for event in await agent.ask(tools=[PATCH], stream=True)][-1].response
    else:
        response = await agent.ask(tools=[PATCH])
    assert [item.input for item in response.output] == [arguments]


async def test_a_custom_tool_of_a_namespace_and_one_of_free_text(agent: Agent) -> None:
    agent.harness.model.answer = lambda request: custom_call('{"input": "x"}', "files__note")
    note = {"type": "custom", "name": "note", "format": {"type": "text"}}
    tools = [{"type": "namespace", "name": "files", "description": "d", "tools": [note]}, note]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "note"}]}
    (call,) = (await agent.ask(tools=tools)).output
    assert (call.namespace, call.name, call.input) == ("files", "note", "x")
    assert [tool["function"]["name"] for tool in agent.asked["tools"]] == ["files__note", "note"]
    agent.harness.model.answer = lambda request: "hi"
    await agent.ask(tools=tools, tool_choice=allowed)
    assert [tool["function"]["name"] for tool in agent.asked["tools"]] == ["note"]


async def test_additional_tools_are_tools_of_the_request_and_the_last_of_a_name_counts(agent: Agent) -> None:
    agent.harness.model.answer = lambda request: custom_call('{"input": "x"}')
    later = [{**TOOL, "description": "later"}, PATCH, {"type": "web_search"}]
    items = [
        {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": later},
        {"role": "user", "content": "hi"},
    ]
    response = await agent.ask(input=items, tools=[TOOL])
    assert (response.output[0].type, response.output[0].input) == ("custom_tool_call", "x")
    assert [tool["function"]["description"] for tool in agent.asked["tools"]] == ["later", "Apply a patch."]
    assert [message["role"] for message in agent.asked["messages"]] == ["user"]
    _, call = await agent.recorded()
    assert call["left_out_tools"] == ["web_search"]
    await agent.ask(input="go on", previous_response_id=response.id, reasoning={"context": "all_turns"})
    assert [tool["function"]["name"] for tool in agent.asked["tools"]] == ["add", "patch"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"previous_response_id": 3}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"extra_body": {"seed": 3}}, "seed"),
        ({"extra_body": {"input": 3}}, "input"),
        ({"tools": [{"type": "some_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [{**TOOL, "output_schema": {"type": "object"}}]}, "tools[0].output_schema"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "none", "tools": []}}, "tool_choice.mode"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "x"}]}},
            "tool_choice",
        ),
        ({"tool_choice": {"type": "hosted"}}, "tool_choice.type"),
        ({"tools": [{"type": "custom", "name": "x", "parameters": {}}]}, "tools[0].parameters"),
        ({"tools": [{"type": "custom", "name": "x", "format": {"type": "json"}}]}, "tools[0].format.type"),
        ({"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar"}}]}, "tools[0].format.syntax"),
        ({"tools": [{"type": "custom", "name": "add"}, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL, {"type": "custom", "name": "add"}]}, "tools[1].name"),
        ({"input": [{"type": "additional_tools", "role": "developer"}]}, "input[0].tools"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input[0].input"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"reasoning": {"context": "current_turn"}}, "reasoning.context"),
        ({"input": [{"type": "item_reference", "id": 3}]}, "input[0].id"),
        ({"input": [{"type": "item_reference", "id": "x", "content": "y"}]}, "input[0].content"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].file_id",
        ),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
    ],
)
async def test_what_cannot_be_translated_is_a_400_that_names_the_field(agent: Agent, fields: Json, named: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await agent.ask(**fields)
    assert caught.value.param == named
    assert f"'{named}'" in caught.value.message
    assert agent.harness.model.calls == []
    _, call = await agent.recorded()
    assert (call["state"], call["http_status"]) == ("refused", 400)


# --- streams ---------------------------------------------------------------------------------------------------------


async def test_the_events_of_a_stream_in_their_order_with_their_indices(agent: Agent) -> None:
    answer = {"reasoning_content": "hm so", "content": "a  b", "tool_calls": [CALL, {**CALL, "id": "call-2"}]}
    agent.harness.model.answer = lambda request: answer
    events = await agent.wire_events()
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    name = agent.harness.model.calls[0].reply["id"]
    halves = (ARGUMENTS[: len(ARGUMENTS) // 2], ARGUMENTS[len(ARGUMENTS) // 2 :])

    def text(index: int, kind: str, empty: Json, done: Json, part: Json, *deltas: str) -> list[Json]:
        place = {"item_id": done["id"], "output_index": index, "content_index": 0}
        extra = {"logprobs": []} if kind == "output_text" else {}
        whole = "".join(deltas)
        return [
            {"type": "response.output_item.added", "output_index": index, "item": empty},
            {"type": "response.content_part.added", **place, "part": {**part, "text": ""}},
            *({"type": f"response.{kind}.delta", **place, "delta": delta, **extra} for delta in deltas),
            {"type": f"response.{kind}.done", **place, "text": whole, **extra},
            {"type": "response.content_part.done", **place, "part": {**part, "text": whole}},
            {"type": "response.output_item.done", "output_index": index, "item": done},
        ]

    def call(index: int, call_id: str, *pieces: str) -> list[Json]:
        item = {"id": f"fc_{name}_{index}", "type": "function_call", "call_id": call_id, "name": "add"}
        place = {"output_index": index, "item_id": item["id"]}
        done = {**item, "arguments": ARGUMENTS, "status": "completed"}
        ended = {"type": "response.function_call_arguments.done", **place, "name": "add", "arguments": ARGUMENTS}
        started = {**item, "arguments": "", "status": "in_progress"}
        return [
            {"type": "response.output_item.added", "output_index": index, "item": started},
            *({"type": "response.function_call_arguments.delta", **place, "delta": piece} for piece in pieces),
            ended,
            {"type": "response.output_item.done", "output_index": index, "item": done},
        ]

    thought = {"type": "reasoning_text", "text": "hm so"}
    thoughts = {"id": f"rs_{name}_0", "type": "reasoning", "summary": []}
    words = {"type": "output_text", "text": "a  b", "annotations": [], "logprobs": []}
    message = {"id": f"msg_{name}_1", "type": "message", "role": "assistant"}
    started, done = {"status": "in_progress", "content": []}, {"status": "completed"}
    expected = [
        *text(
            0,
            "reasoning_text",
            {**thoughts, **started},
            {**thoughts, "content": [thought], "encrypted_content": sealed("hm so"), **done},
            thought,
            "hm",
            " so",
        ),
        *text(1, "output_text", {**message, **started}, {**message, **done, "content": [words]}, words, "a", "  b"),
        *call(2, "call-1", *halves),
        *call(3, "call-2", ARGUMENTS),
    ]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["output"] == []
    assert events[0]["response"]["status"] == "in_progress"
    shown = [{name: value for name, value in event.items() if name != "sequence_number"} for event in events]
    assert shown[2:-1] == expected
    assert events[-1]["type"] == "response.completed"
    done_items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done_items


HALF = b'data: {"id": "x", "choices": [{"index": 0, "delta": {"content": "ha"}, "finish_reason": null}]}\n\n'


async def test_the_event_of_an_error_goes_on_with_the_numbers(agent: Agent) -> None:
    agent.harness.model.faults = [Fault(body=HALF, headers=SSE)]
    events = await agent.wire_events()
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[-2:]] == ["response.output_text.delta", "error"]
    assert "before the reply was complete" in events[-1]["message"]


# --- a server that speaks the dialect itself -------------------------------------------------------------------------


@pytest.fixture
async def native(harness: GatewayHarness) -> AsyncGenerator[Agent, None]:
    entry = harness.model.entry("gpt", model="openai/gpt-9", api_key="provider-key", dialects=["responses"])
    harness.proxy.update_model_list([entry])
    made = ResponsesAgent(harness)
    async with made.client:
        yield made


async def test_a_native_server_gets_the_request_as_it_is(native: Agent) -> None:
    fields: Json = {"previous_response_id": "resp_1", "tools": [{"type": "web_search"}], "instructions": "s"}
    response = await native.ask(model="gpt", **fields)
    exchange = native.harness.model.calls[0]
    assert exchange.path == "/v1/responses"
    assert exchange.request == {"model": "gpt-9", "input": "hi", **fields}
    assert exchange.headers["authorization"] == "Bearer provider-key"
    assert response.id == exchange.reply["id"]
    attributes, call = await native.recorded()
    assert call["state"] == "no_tokens"
    assert attributes["gen_ai.response.id"] == response.id
    assert [attributes[f"gen_ai.prompt.{i}.content"] for i in (0, 1)] == ["s", "hi"]


@pytest.mark.parametrize("streams", [True, False])
async def test_a_native_stream_passes_and_is_recorded_without_tokens(native: Agent, streams: bool) -> None:
    native.harness.model.streams = streams
    native.harness.model.answer = lambda request: TEXT
    async with native.stream(model="gpt") as stream:
        response = await stream.get_final_response()
    assert response.output_text == TEXT
    attributes, call = await native.recorded()
    assert (call["state"], call["streamed"], call["finish_reason"]) == ("no_tokens", True, "stop")
    assert attributes["gen_ai.completion.0.content"] == TEXT
    assert (attributes["gen_ai.usage.prompt_tokens"], attributes["gen_ai.usage.completion_tokens"]) == (7, 5)


async def test_a_native_response_that_failed_is_heard_and_recorded_as_failed(native: Agent) -> None:
    response = {"id": "resp_1", "object": "response", "model": "gpt-9", "status": "in_progress", "output": []}
    item = {"id": "m", "type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so far"}]}
    failed = {**response, "status": "failed", "error": {"code": "server_error", "message": "out of memory"}}
    events = [
        {"type": "response.created", "sequence_number": 0, "response": response},
        {"type": "response.output_item.done", "sequence_number": 1, "output_index": 0, "item": item},
        {"type": "response.failed", "sequence_number": 2, "response": failed},
    ]
    body = b"".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events)
    native.harness.model.faults = [Fault(body=body, headers=SSE)]
    received = [event.to_dict() async for event in await native.ask(model="gpt", stream=True)]
    assert [event["type"] for event in received] == [event["type"] for event in events]
    assert received[-1]["response"]["error"]["message"] == "out of memory"
    attributes, call = await native.recorded()
    assert (call["state"], attributes["gen_ai.completion.0.content"]) == ("upstream_error", "so far")
