"""Reading one call out of one span, in every spelling, and out of spans that are wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentlightning.adapter.spans.attributes import Problem, decode_text
from agentlightning.adapter.spans.tokens import CallReading, read_call
from agentlightning.semconv import LightningCallAttributes as Call
from tests.adapter.span_maker import gateway_call, span, with_attributes


def read(attributes: dict[str, Any], name: str = "raw_gen_ai_request") -> tuple[CallReading, list[Problem]]:
    problems: list[Problem] = []
    return read_call(with_attributes(span("s", name, None, 0, 1), attributes), problems), problems


def test_the_typed_attributes_of_the_gateway_are_read() -> None:
    problems: list[Problem] = []
    record = gateway_call("call-1", 3, [1, 2], [3, 4], logprobs=[-0.25, -1], weight_version=5)[1]
    call = read_call(record, problems)
    assert (call.prompt_token_ids, call.completion_token_ids, call.logprobs) == ([1, 2], [3, 4], [-0.25, -1.0])
    assert (call.call_id, call.finish_reason, call.weight_version, call.state) == ("call-1", "stop", 5, "ok")
    assert problems == []


def choice(**more: Any) -> list[dict[str, Any]]:
    return [{"index": 0, "finish_reason": "length", "token_ids": [3, 4], "message": {"content": None}, **more}]


@pytest.mark.parametrize("spell", [repr, json.dumps])
@pytest.mark.parametrize("token", ["plain", "don't", 'she said "None of it" \\ True', "a\nb"])
def test_the_text_form_is_read_as_json_and_as_a_python_literal(spell: Any, token: str) -> None:
    content = [{"token": token, "logprob": -0.5}, {"token": "b", "logprob": -1.5}]
    choices = choice(message={"content": token}, logprobs={"content": content})
    call, problems = read({"llm.hosted_vllm.prompt_token_ids": "[1, 2]", "llm.hosted_vllm.choices": spell(choices)})
    assert (call.prompt_token_ids, call.completion_token_ids, call.logprobs) == ([1, 2], [3, 4], [-0.5, -1.5])
    assert (call.finish_reason, call.state, problems) == ("length", "ok", [])


@pytest.mark.parametrize("text", ["None", "[True, False]", "{'a': None, 'b': 'None'}", "(1, 2)", "{'a\\'b': [1.5]}"])
def test_a_python_literal_is_read_as_python_reads_it(text: str) -> None:
    assert decode_text(text) == eval(text)


def test_text_that_spells_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="neither JSON nor a Python literal"):
        decode_text("__import__('os')")


def test_the_typed_attributes_win_over_the_text_and_the_text_over_the_client() -> None:
    text = {"llm.hosted_vllm.prompt_token_ids": "[5]", "llm.hosted_vllm.response_token_ids": "[[6], [7]]"}
    client = {"prompt_token_ids": [8], "response_token_ids": [9]}
    typed = {Call.PROMPT_TOKEN_IDS.value: [1], Call.COMPLETION_TOKEN_IDS.value: [2]}
    assert read({**client, **text, **typed})[0].prompt_token_ids == [1]
    assert read({**client, **text})[0].prompt_token_ids == [5]
    assert read({**client, **text})[0].completion_token_ids == [6]
    assert read(client)[0].completion_token_ids == [9]


@pytest.mark.parametrize(
    ("prompt_key", "completion_key"),
    [
        ("prompt_token_ids", "response_token_ids"),
        ("agentlightning.operation.output.prompt_token_ids", "agentlightning.operation.output.response_token_ids.0"),
        ("prompt_token_ids", "agentlightning.operation.output.choices.0.token_ids"),
        ("prompt_token_ids", "agentlightning.operation.output.choices.0.provider_specific_fields.token_ids"),
    ],
)
def test_the_spellings_of_instrumented_clients_are_read(prompt_key: str, completion_key: str) -> None:
    call, problems = read({prompt_key: [1, 2], completion_key: [3]}, name="openai.chat.completion")
    assert (call.prompt_token_ids, call.completion_token_ids, problems) == ([1, 2], [3], [])


def test_log_probabilities_of_a_client_are_read_from_its_text() -> None:
    text = json.dumps([{"token": "a", "logprob": -0.5}])
    assert read({"logprobs.content": text})[0].logprobs == [-0.5]


@pytest.mark.parametrize(
    "bad",
    [
        {Call.PROMPT_TOKEN_IDS.value: [1.5]},
        {Call.PROMPT_TOKEN_IDS.value: [True, False]},
        {Call.PROMPT_TOKEN_IDS.value: "[1, 2"},
        {Call.COMPLETION_TOKEN_IDS.value: 7},
        {Call.COMPLETION_LOGPROBS.value: [float("nan")]},
        {Call.COMPLETION_LOGPROBS.value: ["-0.5"]},
        {Call.WEIGHT_VERSION.value: "three"},
        {Call.FINISH_REASON.value: 3},
        {Call.STATE.value: "splendid"},
        {"llm.hosted_vllm.choices": "nonsense"},
        {"llm.hosted_vllm.choices": "[1]"},
        {"logprobs.content": "{broken"},
        {"logprobs.content": "[1, 2]"},
    ],
)
def test_a_bad_attribute_is_reported_by_name_and_the_rest_is_read(bad: dict[str, Any]) -> None:
    call, problems = read({"prompt_token_ids": [1], "response_token_ids": [2], **bad})
    assert (call.prompt_token_ids, call.completion_token_ids) == ([1], [2])
    assert [problem.kind for problem in problems] == ["bad_attribute"]
    assert next(iter(bad)) in problems[0].detail


def test_a_negative_number_is_no_token_id_whoever_wrote_it() -> None:
    for bad in ({"response_token_ids": [999999999, -5]}, {"llm.hosted_vllm.choices": repr([{"token_ids": [2, -5]}])}):
        call, _ = read({"prompt_token_ids": [1], **bad})
        assert (call.completion_token_ids, call.state) == ([], "no_tokens")


def test_further_choices_are_reported_also_when_the_typed_attributes_say_all() -> None:
    two = repr([*choice(), {**choice()[0], "index": 1}])
    record = gateway_call("call-1", 1, [1], [2], **{"llm.hosted_vllm.choices": two})[1]
    problems: list[Problem] = []
    assert read_call(record, problems).completion_token_ids == [2]
    assert [problem.kind for problem in problems] == ["extra_choices"]


def test_a_call_without_tokens_says_whether_it_failed() -> None:
    problems: list[Problem] = []
    failed = span("s", "openai.chat.completion", None, 0, 1, status="ERROR")
    assert read_call(failed, problems).state == "upstream_error"
    assert read_call(with_attributes(failed, {"gen_ai.response.id": "c1"}), problems).state == "no_tokens"
    assert read_call(gateway_call("x", 1, [], [], state="refused")[1], problems).state == "refused"
