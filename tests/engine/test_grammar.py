"""Forced tool calls and JSON replies: drawn tokens fit, recorded probabilities are the model's own."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from agentlightning.adapter.rows.samples import Sample
from agentlightning.demo.calculator import TOOLS
from agentlightning.engine import grammar
from agentlightning.engine.chat import ChatFormat, parse_reply
from agentlightning.engine.engine import InferenceEngine
from agentlightning.training.learner.policy import Policy
from tests.engine.clients import ask, content, logprobs, stream, tokens

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 7}},
}


def tool(name: str, parameters: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or WEATHER, **fields}}


def json_of(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


def calls(reply: dict[str, Any], index: int = 0) -> list[tuple[str, dict[str, Any]]]:
    made = reply["choices"][index]["message"].get("tool_calls") or []
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in made]


def fits(arguments: dict[str, Any]) -> bool:
    return set(arguments) == {"city", "days"} and arguments["city"] in ("Oslo", "Rome") and 1 <= arguments["days"] <= 7


@pytest.mark.parametrize("send", [ask, stream])
@pytest.mark.parametrize("choice", ["required", {"function": {"name": "forecast"}}])
def test_a_forced_tool_is_called_once_with_arguments_that_fit(
    byte_engine: InferenceEngine, send: Any, choice: Any
) -> None:
    tools = [tool("weather"), tool("forecast", strict=True)]
    for seed in range(4):
        fields = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "seed": seed, "max_tokens": 120}
        reply = send(byte_engine, **fields)
        [(name, arguments)] = calls(reply)
        assert name in (("weather", "forecast") if choice == "required" else ("forecast",))
        assert fits(arguments)
        assert reply["choices"][0]["finish_reason"] == "tool_calls"
        assert tokens(reply)[-1] == byte_engine._policy.tokenizer.eos_token_id


def test_a_json_reply_follows_its_schema_strict_or_not(byte_engine: InferenceEngine) -> None:
    lax = {**WEATHER, "not": {"required": ["x"]}}  # of which the library does not know `not`
    for response_format in (json_of(WEATHER, strict=True), json_of(lax)):
        for send in (ask, stream):
            reply = send(byte_engine, response_format=response_format, seed=5, max_tokens=120)
            assert fits(json.loads(content(reply)))
            assert reply["choices"][0]["finish_reason"] == "stop"
    ends = byte_engine._policy.tokenizer('"}')["input_ids"]
    bias = {str(token): 20 for token in ends}
    anything = ask(byte_engine, response_format={"type": "json_object"}, logit_bias=bias, max_tokens=120, seed=1)
    assert isinstance(json.loads(content(anything)), dict)


def test_with_tools_that_need_not_be_called_the_reply_is_json_or_a_call(byte_engine: InferenceEngine) -> None:
    for seed in range(6):
        reply = ask(
            byte_engine, tools=[tool("weather")], response_format=json_of(WEATHER), seed=seed, max_tokens=200,
            parallel_tool_calls=False,
        )  # fmt: skip
        made = calls(reply)
        assert fits(made[0][1] if made else json.loads(content(reply)))


def test_calls_with_all_kinds_of_settings_share_a_batch(byte_engine: InferenceEngine) -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"response_format": json_of(WEATHER), "n": 3},
        {"tools": [tool("weather")], "tool_choice": "required", "parallel_tool_calls": False},
        {"response_format": json_of({"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3})},
        {"response_format": json_of({"const": "yes"}), "temperature": 0},
        {"stop": ["e", "\n"], "top_k": 20},
        {"top_p": 0.2, "repetition_penalty": 5.0},
        {"top_k": 1},
        {"min_p": 1.0},
        {"temperature": 0},
        {"logit_bias": {"70": 100}, "max_tokens": 12},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "max_tokens": 12},
    ]

    def several(fields: dict[str, Any]) -> list[list[int]]:
        reply = ask(byte_engine, **{"seed": 2, "max_tokens": 100, **fields})
        return [tokens(reply, index) for index in range(fields.get("n", 1))]

    alone = [several(fields) for fields in settings]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(several, settings)) == alone
    assert alone[7] == alone[8] == alone[9]
    assert alone[10] == [[70] * 12]
    assert len(set(alone[11][0])) == 12  # a token that was said is not said again


def test_the_recorded_log_probabilities_give_a_first_ratio_of_one(byte_engine: InferenceEngine) -> None:
    policy: Policy = byte_engine._policy
    requests = [
        {"response_format": json_of(WEATHER)},
        {"tools": [tool("weather")], "tool_choice": "required", "parallel_tool_calls": False},
        {"top_k": 3, "min_p": 0.01, "logit_bias": {"70": 5}, "frequency_penalty": 1.0, "stop": ["e"]},
    ]
    rows: list[Sample] = []
    for number, fields in enumerate(requests):
        reply = ask(byte_engine, seed=number, max_tokens=100, **fields)
        prompt, reply_tokens = reply["prompt_token_ids"], tokens(reply)
        mask, sampler_logprobs = [0] * len(prompt) + [1] * len(reply_tokens), [0.0] * len(prompt) + logprobs(reply)
        rows.append(Sample(str(number), "a", prompt + reply_tokens, mask, sampler_logprobs, [], []))
    figures = policy.update(rows, [1.0, -1.0, 0.5]).figures
    assert figures["steps"] == 1
    assert figures["first_ratio_error"] < 1e-4


def test_the_words_of_the_demos_vocabulary_make_its_tool_call_and_no_more(engine: InferenceEngine) -> None:
    end = engine._policy.tokenizer('"}}')["input_ids"][0]
    reply = ask(engine, tools=TOOLS, tool_choice="required", max_tokens=60, logit_bias={str(end): 3}, seed=1)
    assert all(name == "calculator" and set(arguments) == {"expression"} for name, arguments in calls(reply))
    assert calls(reply)
    with pytest.raises(openai.BadRequestError, match="no token that the schema allows"):
        ask(engine, response_format=json_of({"const": "Zürich_{}"}), max_tokens=20)


@pytest.mark.parametrize("send", [ask, stream])
def test_a_limit_that_cuts_the_grammar_is_reported_as_length(byte_engine: InferenceEngine, send: Any) -> None:
    reply = send(byte_engine, response_format=json_of(WEATHER), max_tokens=5)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert len(tokens(reply)) == 5
    cut = send(byte_engine, tools=[tool("weather")], tool_choice="required", max_tokens=12)
    assert (calls(cut), cut["choices"][0]["finish_reason"]) == ([], "length")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": json_of({"type": "text"})}, "Invalid type: text"),
        ({"response_format": json_of({"$ref": "#/nowhere"})}, "cannot be compiled"),
        ({"response_format": json_of({"type": "string", "not": {"const": "a"}}, strict=True)}, 'Unimplemented.*"not"'),
        ({"response_format": json_of({"type": "string", "pattern": "(((("})}, "cannot be compiled"),
        ({"tools": [tool("weather", {"type": "array"})], "tool_choice": "required"}, "of type 'object'"),
        ({"tools": [tool("f", {"properties": {"a": {"type": "x"}}})], "tool_choice": "required"}, "'tools' cannot be"),
        ({"response_format": json_of({"enum": ["x" * 300_000]})}, "the limit is 262144"),
    ],
)
def test_a_schema_that_cannot_be_compiled_is_400_in_the_librarys_words(
    byte_engine: InferenceEngine, fields: dict[str, Any], words: str
) -> None:
    for streams in (False, True):  # before the first frame of a stream too
        with pytest.raises(openai.BadRequestError, match=words):
            ask(byte_engine, stream=streams, **fields)


def test_a_schema_that_takes_too_long_is_refused_and_others_are_served_meanwhile(
    byte_engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "COMPILE_SECONDS", 0.0)
    with pytest.raises(openai.BadRequestError, match="took more than"):
        ask(byte_engine, response_format=json_of(WEATHER))
    assert ask(byte_engine, max_tokens=1)["choices"]


def test_without_the_library_the_refusal_names_the_extra(
    byte_engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)  # as if it were not installed
    for fields in ({"response_format": {"type": "json_object"}}, {"tools": [tool("f")], "tool_choice": "required"}):
        with pytest.raises(openai.InternalServerError, match=r"agl-framework\[grpo\]") as refused:
            ask(byte_engine, **fields)
        assert refused.value.status_code == 501
    assert ask(byte_engine, max_tokens=1)["choices"]


def test_without_parallel_calls_the_reply_ends_with_the_first_one(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing = engine._policy.tokenizer("</tool_call>")["input_ids"][0]
    fields = {"tools": TOOLS, "logit_bias": {str(closing): 100}, "max_tokens": 9}
    reply = ask(engine, parallel_tool_calls=False, **fields)
    assert (len(tokens(reply)), reply["choices"][0]["stop_reason"]) == (1, None)
    assert len(tokens(ask(engine, **fields))) > 1
    several = parse_reply('<tool_call>[{"name": "a"}, {"name": "b"}]</tool_call>')
    monkeypatch.setattr(ChatFormat, "read", lambda *_, **__: several)
    assert [
        len(ask(engine, parallel_tool_calls=each, **fields)["choices"][0]["message"]["tool_calls"])
        for each in (True, False)
    ] == [2, 1]
