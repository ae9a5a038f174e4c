"""Forced tool calls and JSON replies: what is drawn fits, what is recorded is the model's own."""

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


needs_llguidance = pytest.mark.usefixtures("_llguidance")


@pytest.fixture
def _llguidance() -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'agl-framework[grpo]'")


@needs_llguidance
@pytest.mark.parametrize("asked", [ask, stream])
def test_a_required_tool_is_called_with_arguments_that_fit(byte_engine: InferenceEngine, asked: Any) -> None:
    tools = [tool("weather"), tool("forecast", strict=True)]
    for seed in range(4):
        reply = asked(
            byte_engine, tools=tools, tool_choice="required", parallel_tool_calls=False, seed=seed, max_tokens=120
        )
        [(name, arguments)] = calls(reply)
        assert name in ("weather", "forecast")
        assert fits(arguments)
        assert reply["choices"][0]["finish_reason"] == "tool_calls"
        assert tokens(reply)[-1] == byte_engine._policy.tokenizer.eos_token_id


@needs_llguidance
def test_a_named_tool_is_called_once_and_no_other(byte_engine: InferenceEngine) -> None:
    named = {"tools": [tool("weather"), tool("forecast")], "tool_choice": {"function": {"name": "forecast"}}}
    for seed in range(4):
        [(name, arguments)] = calls(ask(byte_engine, **named, seed=seed, max_tokens=120))
        assert (name, fits(arguments)) == ("forecast", True)


@needs_llguidance
def test_a_json_reply_follows_its_schema_strict_or_not(byte_engine: InferenceEngine) -> None:
    lax = {**WEATHER, "not": {"required": ["x"]}}  # of which the library does not know `not`
    for wanted in (json_of(WEATHER, strict=True), json_of(lax)):
        for asked in (ask, stream):
            reply = asked(byte_engine, response_format=wanted, seed=5, max_tokens=120)
            assert fits(json.loads(content(reply)))
            assert reply["choices"][0]["finish_reason"] == "stop"
    ends = byte_engine._policy.tokenizer('"}')["input_ids"]
    bias = {str(token): 20 for token in ends}
    anything = ask(byte_engine, response_format={"type": "json_object"}, logit_bias=bias, max_tokens=120, seed=1)
    assert isinstance(json.loads(content(anything)), dict)


@needs_llguidance
def test_with_tools_that_need_not_be_called_the_reply_is_json_or_a_call(byte_engine: InferenceEngine) -> None:
    for seed in range(6):
        reply = ask(
            byte_engine, tools=[tool("weather")], response_format=json_of(WEATHER), seed=seed, max_tokens=200,
            parallel_tool_calls=False,
        )  # fmt: skip
        made = calls(reply)
        assert fits(made[0][1] if made else json.loads(content(reply)))


@needs_llguidance
def test_each_choice_has_a_place_of_its_own_in_the_grammar(byte_engine: InferenceEngine) -> None:
    reply = ask(byte_engine, response_format=json_of(WEATHER), n=6, seed=1, max_tokens=100)
    said = [content(reply, index) for index in range(6)]
    assert all(fits(json.loads(text)) for text in said)
    assert len(set(said)) > 1


@needs_llguidance
def test_calls_with_different_grammars_and_none_share_a_batch(byte_engine: InferenceEngine) -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"response_format": json_of(WEATHER)},
        {"tools": [tool("weather")], "tool_choice": "required", "parallel_tool_calls": False},
        {"response_format": json_of({"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3})},
        {"stop": ["e"], "top_k": 20},
        {"response_format": json_of({"const": "yes"}), "temperature": 0},
    ]

    def one(fields: dict[str, Any]) -> list[int]:
        return tokens(ask(byte_engine, seed=2, max_tokens=100, **fields))

    alone = [one(fields) for fields in settings]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(one, settings)) == alone


@needs_llguidance
def test_the_recorded_log_probabilities_give_a_first_ratio_of_one(byte_engine: InferenceEngine) -> None:
    policy: Policy = byte_engine._policy
    asked = [
        {"response_format": json_of(WEATHER)},
        {"tools": [tool("weather")], "tool_choice": "required", "parallel_tool_calls": False},
        {"top_k": 3, "min_p": 0.01, "logit_bias": {"70": 5}, "frequency_penalty": 1.0, "stop": ["e"]},
    ]
    rows: list[Sample] = []
    for number, fields in enumerate(asked):
        reply = ask(byte_engine, seed=number, max_tokens=100, **fields)
        prompt, said = reply["prompt_token_ids"], tokens(reply)
        mask, known = [0] * len(prompt) + [1] * len(said), [0.0] * len(prompt) + logprobs(reply)
        rows.append(Sample(str(number), "a", prompt + said, mask, known, [], []))
    figures = policy.update(rows, [1.0, -1.0, 0.5]).figures
    assert figures["steps"] == 1
    assert figures["first_ratio_error"] < 1e-4


@needs_llguidance
def test_the_words_of_the_demos_vocabulary_make_its_tool_call(engine: InferenceEngine) -> None:
    end = engine._policy.tokenizer('"}}')["input_ids"][0]
    reply = ask(engine, tools=TOOLS, tool_choice="required", max_tokens=60, logit_bias={str(end): 3}, seed=1)
    assert all(name == "calculator" and set(given) == {"expression"} for name, given in calls(reply))
    assert calls(reply)


@needs_llguidance
def test_what_the_vocabulary_cannot_spell_is_told(engine: InferenceEngine) -> None:
    with pytest.raises(openai.BadRequestError, match="no token for what the schema asks for"):
        ask(engine, response_format=json_of({"const": "Zürich_{}"}), max_tokens=20)
    assert ask(engine, max_tokens=2)["choices"]


@needs_llguidance
@pytest.mark.parametrize("asked", [ask, stream])
def test_a_limit_that_cuts_the_grammar_is_told_as_length(byte_engine: InferenceEngine, asked: Any) -> None:
    reply = asked(byte_engine, response_format=json_of(WEATHER), max_tokens=5)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert len(tokens(reply)) == 5
    cut = asked(byte_engine, tools=[tool("weather")], tool_choice="required", max_tokens=12)
    assert (calls(cut), cut["choices"][0]["finish_reason"]) == ([], "length")


@needs_llguidance
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": json_of({"type": "text"})}, "Invalid type: text"),
        ({"response_format": json_of({"$ref": "#/nowhere"})}, "cannot be compiled"),
        ({"response_format": json_of({"type": "string", "not": {"const": "a"}}, strict=True)}, 'Unimplemented.*"not"'),
        ({"response_format": json_of({"type": "string", "pattern": "(((("})}, "cannot be compiled"),
        ({"tools": [tool("weather", {"type": "array"})], "tool_choice": "required"}, "of type 'object'"),
        ({"tools": [tool("f", {"properties": {"a": {"type": "x"}}})], "tool_choice": "required"}, "'tools' cannot be"),
        ({"response_format": json_of({"enum": ["x" * 300_000]})}, "at most 262144"),
    ],
)
def test_a_schema_that_cannot_be_compiled_is_400_in_the_librarys_words(
    byte_engine: InferenceEngine, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        ask(byte_engine, **fields)
    with pytest.raises(openai.BadRequestError, match=words):  # before the first frame of a stream too
        ask(byte_engine, stream=True, **fields)
    assert ask(byte_engine, max_tokens=1)["choices"]


@needs_llguidance
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


def test_without_parallel_calls_the_reply_ends_with_the_first_one(engine: InferenceEngine) -> None:
    tokenizer = engine._policy.tokenizer
    said = tokenizer('<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 2"}}</tool_call>')["input_ids"]
    bias = {str(token): 100 for token in said[-1:]}
    reply = ask(engine, tools=TOOLS, parallel_tool_calls=False, logit_bias=bias, max_tokens=9)
    assert len(tokens(reply)) == 1
    assert reply["choices"][0]["stop_reason"] is None
    assert len(tokens(ask(engine, tools=TOOLS, logit_bias=bias, max_tokens=9))) > 1


def test_without_parallel_calls_of_a_list_of_them_the_first_one_counts(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = parse_reply('<tool_call>[{"name": "a"}, {"name": "b"}]</tool_call>')
    monkeypatch.setattr(ChatFormat, "read", lambda *_, **__: several)
    for fields, names in (({}, ["a", "b"]), ({"parallel_tool_calls": False}, ["a"])):
        [choice] = ask(engine, tools=TOOLS, max_tokens=1, **fields)["choices"]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == names
