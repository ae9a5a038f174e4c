"""Requests are honoured or refused by name; messages become prompts and completions become messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentlightning.algorithm.grpo.engine.chat import ChatFormat, RequestError, message_body, parse_request
from agentlightning.algorithm.grpo.engine.tool_calls import parse_reply
from agentlightning.algorithm.grpo.policy import Policy

PLAIN: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {}}}


def test_what_the_request_says_is_what_is_sampled() -> None:
    request = parse_request(
        {**PLAIN, "temperature": 0.5, "top_p": 0.9, "max_tokens": 3, "seed": 5, "logprobs": 1, "return_token_ids": True}
    )
    assert (request.temperature, request.top_p, request.max_new_tokens, request.seed) == (0.5, 0.9, 3, 5)
    assert (request.logprobs, request.return_token_ids) == (True, True)


def test_a_bare_request_has_the_defaults_of_the_api() -> None:
    request = parse_request(PLAIN)
    assert (request.temperature, request.top_p, request.max_new_tokens, request.seed) == (1.0, 1.0, None, None)
    assert (request.tools, request.logprobs, request.return_token_ids) == (None, False, False)


def test_max_completion_tokens_wins_over_its_old_name() -> None:
    assert parse_request({**PLAIN, "max_completion_tokens": 4, "max_tokens": 9}).max_new_tokens == 4


def test_tools_are_left_out_when_the_request_wants_none_called() -> None:
    assert parse_request({**PLAIN, "tools": [TOOL]}).tools == [TOOL]
    assert parse_request({**PLAIN, "tools": [TOOL], "tool_choice": "none"}).tools is None


@pytest.mark.parametrize(
    "neutral",
    [
        {"n": 1},
        {"stream": False},
        {"stop": None},
        {"stop": []},
        {"presence_penalty": 0.0},
        {"logit_bias": {}},
        {"response_format": {"type": "text"}},
        {"top_k": -1},
        {"user": "me", "metadata": {"a": "b"}, "store": True},
        {"parallel_tool_calls": True},
    ],
)
def test_fields_that_change_nothing_are_accepted(neutral: dict[str, Any]) -> None:
    assert parse_request({**PLAIN, **neutral}) == parse_request(PLAIN)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", 0),
        ("stop", ["\n"]),
        ("top_logprobs", 3),
        ("frequency_penalty", 0.1),
        ("presence_penalty", -1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 100}),
        ("top_k", 50),
        ("min_p", 0.1),
        ("parallel_tool_calls", False),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "calculator"}}),
        ("tools", {"calculator": {}}),
        ("tools", ["calculator"]),
        ("temperature", -0.1),
        ("temperature", 0.001),
        ("temperature", 2.5),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_completion_tokens", -1),
        ("seed", "seven"),
        ("logprobs", "yes"),
        ("return_token_ids", 2),
        ("messages", "hello"),
        ("messages", []),
        ("messages", ["hello"]),
        ("model", 7),
        ("guided_json", {"type": "object"}),
    ],
)
def test_a_field_that_is_not_honoured_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as refused:
        parse_request({**PLAIN, name: value})
    assert (refused.value.status, refused.value.param) == (400, name)
    assert refused.value.body()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [None, [], "text", {}, {"model": "policy"}, {"messages": []}])
def test_a_body_without_model_or_messages_is_refused(body: Any) -> None:
    with pytest.raises(RequestError):
        parse_request(body)


def test_a_misspelt_field_is_refused_with_the_nearest_right_one() -> None:
    with pytest.raises(RequestError, match="did you mean 'temperature'"):
        parse_request({**PLAIN, "temprature": 1.0})


@pytest.mark.parametrize(
    "message",
    [
        {"content": "no role"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": {"text": "no list"}},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "no function"}]},
    ],
)
def test_a_malformed_message_is_refused_with_its_place(policy: Policy, message: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"messages\[1\]"):
        ChatFormat(policy.tokenizer).prompt_ids([{"role": "user", "content": "hello"}, message], None)


def test_text_parts_are_joined(policy: Policy) -> None:
    chat_format = ChatFormat(policy.tokenizer)
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "3 plus 4?"}]
    whole = chat_format.prompt_ids([{"role": "user", "content": "What is 3 plus 4?"}], None)
    assert chat_format.prompt_ids([{"role": "user", "content": parts}], None) == whole


def test_several_calls_are_read_in_order_and_get_ids_of_their_own() -> None:
    text = "".join(f'<tool_call>{{"name": "f{n}", "arguments": {{"n": {n}}}}}</tool_call>\n' for n in range(3))
    calls = message_body(parse_reply(text))["tool_calls"]
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls] == [
        (f"f{n}", {"n": n}) for n in range(3)
    ]
    assert len({call["id"] for call in calls}) == 3


def test_tool_calls_are_not_read_when_no_tool_was_offered(policy: Policy) -> None:
    said = '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 2"}}</tool_call>'
    tokens = policy.tokenizer(said)["input_ids"]
    chat_format = ChatFormat(policy.tokenizer)
    assert chat_format.reply(tokens, with_tools=False).content == said
    assert chat_format.reply(tokens, with_tools=True).content is None
