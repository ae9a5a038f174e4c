"""Each field of a request is honoured, or refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.engine.request import RequestError, parse_request

PLAIN: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {}}}


@pytest.mark.parametrize(
    ("fields", "read"),
    [
        (
            {},
            {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": None, "seed": None, "tools": None, "logprobs": False},
        ),
        ({"temperature": 0.5, "top_p": 0.9, "seed": 5}, {"temperature": 0.5, "top_p": 0.9, "seed": 5}),
        ({"logprobs": 1, "return_token_ids": True}, {"logprobs": True, "return_token_ids": True}),
        ({"max_tokens": 3}, {"max_new_tokens": 3}),
        ({"max_completion_tokens": 4, "max_tokens": 9}, {"max_new_tokens": 4}),
        ({"tools": [TOOL]}, {"tools": [TOOL]}),
        ({"tools": [TOOL], "tool_choice": "none"}, {"tools": None}),
        ({"user": "me", "service_tier": "auto"}, {"without_effect": ["service_tier", "user"]}),
    ],
)
def test_a_request_is_read_field_by_field(fields: dict[str, Any], read: dict[str, Any]) -> None:
    request = parse_request({**PLAIN, **fields})
    assert {name: getattr(request, name) for name in read} == read


READ_BY_THE_ENGINE = (
    *("model", "messages", "tools", "constraint", "one_call", "temperature", "top_p", "adjustments", "max_new_tokens"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "seed", "n", "logprobs", "top_logprobs"),
    *("return_token_ids", "template_fields"),
)


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
        {"best_of": 1, "modalities": ["text"], "ignore_eos": False, "functions": []},
        {"stop": ""},
        {"repetition_penalty": 1.0, "min_p": 0.0, "min_tokens": 0, "stop_token_ids": []},
    ],
)
def test_fields_that_change_nothing_are_accepted(neutral: dict[str, Any]) -> None:
    request, plain = parse_request({**PLAIN, **neutral}), parse_request(PLAIN)
    for name in READ_BY_THE_ENGINE:
        assert getattr(request, name) == getattr(plain, name), name


REFUSED: dict[str, list[Any]] = {
    "n": [0, 1000],
    "best_of": [2],
    "stop": [7, ["", "a"], ["a" * 1001], ["a"] * 65],
    "stop_token_ids": [["a"], [-1]],
    "include_stop_str_in_output": ["yes"],
    "min_tokens": [-1],
    "top_logprobs": [3],
    "frequency_penalty": [2.1],
    "presence_penalty": ["much"],
    "repetition_penalty": [0, 1e-40],
    "logit_bias": [{"five": 100}, {"5": 101}, [5]],
    "top_k": [1.5],
    "min_p": [1.1],
    "parallel_tool_calls": ["one"],
    "response_format": [{"type": "xml"}, {"type": "json_schema"}, "json"],
    "tool_choice": ["required", "any", {"type": "function", "function": {"name": "calculator"}}],
    "functions": [[{"name": "f"}]],
    "function_call": ["auto"],
    "chat_template_kwargs": [["thinking"]],
    "reasoning_effort": [3],
    "modalities": [["audio"]],
    "ignore_eos": [True],
    "tools": [{"calculator": {}}, ["calculator"]],
    "temperature": [-0.1, 0.001, 2.5, "hot", True],
    "top_p": [0, 1.1],
    "max_tokens": [0, 1.5],
    "max_completion_tokens": [-1],
    "seed": ["seven"],
    "logprobs": ["yes"],
    "return_token_ids": [2],
    "messages": ["hello", [], ["hello"]],
    "model": [7],
    "guided_json": [{"type": "object"}],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
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
