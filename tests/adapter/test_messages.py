"""Spans as chat messages with tools, also from malformed spans."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentlightning.adapter import TraceToMessages
from agentlightning.llm_proxy.calls import GatewayCall
from agentlightning.llm_proxy.recording.spans import spans_of
from agentlightning.types import Event, Span
from tests.adapter.span_maker import CHAT, conversation, span, spoken_call, with_attributes
from tests.adapter.span_maker import said as _said

CALL = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"name": "add", "description": "adds", "parameters": {"type": "object"}}


def said(id: str = "c", parent: str | None = None, **attributes: Any) -> Span:
    values = {f"gen_ai.{key}".replace("__", "."): value for key, value in attributes.items()}
    return with_attributes(span(id, CHAT, parent, 0, 1), values)


def test_a_conversation_with_a_tool_is_told_in_openais_form() -> None:
    call = said(
        prompt__0__role="system",
        prompt__0__content="Be brief.",
        prompt__1__role="user",
        prompt__1__content="1+1?",
        completion__0__role="assistant",
        completion__0__content="2",
        request__functions__0__name="add",
        request__functions__0__description="adds",
        request__functions__0__parameters='{"type": "object"}',
    )
    assert TraceToMessages()([call]) == [
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "1+1?"},
                {"role": "assistant", "content": "2"},
            ],
            "tools": [{"type": "function", "function": TOOL}],
        }
    ]


def test_several_turns_keep_tool_calls_and_their_results() -> None:
    call = said(
        prompt__0__role="assistant",
        prompt__0__content="Let me add.",
        prompt__0__tool_calls__0__id="t1",
        prompt__0__tool_calls__0__name="add",
        prompt__0__tool_calls__0__arguments='{"a": 1}',
        prompt__1__role="tool",
        prompt__1__tool_call_id="t1",
        prompt__1__content="2",
    )
    assert TraceToMessages()([call])[0]["messages"] == [
        {"role": "assistant", "content": "Let me add.", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "t1"},
    ]


def test_the_tool_calls_of_an_answer_come_from_child_spans_where_it_tells_none() -> None:
    call = said(completion__0__role="assistant", completion__0__finish_reason="tool_calls")
    tool = {"tool.call.id": "t1", "tool.call.type": "function", "tool.name": "add", "tool.parameters": '{"a": 1}'}
    child = with_attributes(span("k", "tool", "c", 0, 1), tool)
    stranger = with_attributes(span("m", "tool", "elsewhere", 0, 1), tool)
    messages = TraceToMessages()([call, child, stranger])[0]["messages"]
    assert messages == [{"role": "assistant", "content": None, "tool_calls": [CALL]}]


def test_a_call_through_the_gateway_is_told_once() -> None:
    tools = [{"type": "function", "function": TOOL}]
    call = GatewayCall("ro", "at", 1, request={"messages": [{"role": "user", "content": "hi"}], "tools": tools})
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    call.answered({"id": "x", "choices": [{"message": message, "finish_reason": "tool_calls"}]}, None)
    expected = {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
        ],
        "tools": tools,
    }
    gateway = spans_of(call)
    assert TraceToMessages()(gateway) == [expected]
    client_call = said(prompt__0__role="user", prompt__0__content="hi", response__id="x")
    assert len(TraceToMessages()([*gateway, client_call])) == 1


def test_content_in_parts_is_told_in_parts() -> None:
    parts = [{"type": "text", "text": "look"}]
    for text in (json.dumps(parts), repr(parts)):
        call = said(prompt__0__role="user", prompt__0__content=text)
        assert TraceToMessages()([call])[0]["messages"] == [{"role": "user", "content": parts}]


@pytest.mark.parametrize("text", ["[not a list", "[1] is a type of footnote", '["type"]'])
def test_text_that_only_looks_like_parts_stays_text(text: str) -> None:
    call = said(prompt__0__role="user", prompt__0__content=text)
    assert TraceToMessages()([call])[0]["messages"] == [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    "odd",
    [
        {"prompt__1__content": "no role"},
        {"prompt__1__role": "wizard"},
        {"prompt__1__role": "assistant", "prompt__1__tool_calls__0__id": "nameless"},
        {"request__functions__0__description": "nameless"},
        {"completion__0__role": "user"},
    ],
)
def test_what_has_no_meaning_is_left_out_and_the_rest_is_told(odd: dict[str, Any]) -> None:
    (record,) = TraceToMessages()([said(prompt__0__role="user", prompt__0__content="hi", **odd)])
    assert record["messages"][0] == {"role": "user", "content": "hi"}
    assert record["tools"] is None


def test_a_function_without_parameters_has_none() -> None:
    (record,) = TraceToMessages()([said(request__functions__0__name="now", request__functions__0__parameters="{bad")])
    assert record["tools"] == [{"type": "function", "function": {"name": "now", "description": ""}}]


def test_spans_that_are_no_calls_tell_nothing() -> None:
    assert TraceToMessages()([]) == []
    assert TraceToMessages()([span("s", "work", None, 0, 1)]) == []


def test_a_call_is_told_once_whoever_recorded_it() -> None:
    attributes = conversation("six times seven?")
    words = [Event(name="gen_ai.user.message", attributes={"content": "six times seven?"})]
    agent = with_attributes(span("a", "invoke_agent", None, 0, 9), {"gen_ai.operation.name": "invoke_agent"})
    model = with_attributes(span("m", "chat", "a", 1, 8), {"gen_ai.operation.name": "chat"})
    client = with_attributes(span("c", CHAT, None, 2, 7), {"gen_ai.response.id": "r", **_said(attributes, "42")})
    spans = [
        *spoken_call("g", 1, [1], [2], attributes, "42", response_id="r", start=3),
        agent.model_copy(update={"events": words}),
        model.model_copy(update={"events": words, "scope": {"name": "framework"}}),
        client,
    ]
    expected = [{"role": "user", "content": "six times seven?"}, {"role": "assistant", "content": "42"}]
    assert [record["messages"] for record in TraceToMessages()(spans)] == [expected]
    assert [record["messages"] for record in TraceToMessages()(spans[2:4])] == [expected[:1]]


def test_tool_calls_may_be_found_elsewhere_by_a_subclass() -> None:
    class Elsewhere(TraceToMessages):
        def get_tool_calls(self, completion: Span, all_spans: Any, /) -> list[dict[str, Any]]:
            return [{"id": "t1", "name": "add", "arguments": '{"a": 1}'}]

    (record,) = Elsewhere()([said(completion__0__role="assistant")])
    assert record["messages"][0]["tool_calls"] == [CALL]
