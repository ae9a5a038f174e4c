"""The span of one call in the store, and the part of it that the agent sees."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from typing import Any

import pytest

from agentlightning.llm_proxy.calls import GatewayCall
from agentlightning.llm_proxy.dialects import DIALECTS
from agentlightning.llm_proxy.recording import recorder
from agentlightning.llm_proxy.recording.spans import KEPT_BYTES, constrained_by, spans_of
from agentlightning.store.http.server import LightningStoreServer
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import Span
from tests.llm_proxy.harness import GatewayHarness, arrived
from tests.stubs.model_server import Fault, ModelServer


async def test_a_call_is_two_spans_with_one_number_the_second_below_the_first(harness: GatewayHarness) -> None:
    await harness.ask()
    request, raw = await harness.spans()
    assert (request.name, raw.name) == ("litellm_request", "raw_gen_ai_request")
    assert request.sequence_id == raw.sequence_id == 1
    assert (raw.parent_id, raw.trace_id) == (request.span_id, request.trace_id)
    assert request.attributes["gen_ai.response.id"] == raw.attributes["llm.hosted_vllm.id"]
    assert request.start_time is not None
    assert request.end_time is not None
    assert request.start_time <= request.end_time


async def test_the_request_span_holds_messages_tools_and_parameters() -> None:
    tool_call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    tool = {"type": "function", "function": {"name": "add", "description": "sum", "parameters": {"type": "object"}}}
    async with GatewayHarness(ModelServer(lambda _: {"content": None, "tool_calls": [tool_call]})) as harness:
        await harness.ask("1 and 1", tools=[tool], temperature=0.5, max_tokens=9)
        attributes = (await harness.spans())[0].attributes
    assert attributes["gen_ai.prompt.0.role"] == "user"
    assert attributes["gen_ai.prompt.0.content"] == "1 and 1"
    assert attributes["gen_ai.completion.0.tool_calls.0.name"] == "add"
    assert attributes["gen_ai.completion.0.tool_calls.0.arguments"] == '{"a": 1}'
    assert attributes["gen_ai.completion.0.finish_reason"] == "tool_calls"
    assert attributes["llm.request.functions.0.parameters"] == '{"type": "object"}'
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert attributes["gen_ai.request.max_tokens"] == 9
    assert "gen_ai.completion.0.content" not in attributes


@pytest.mark.parametrize(
    ("options", "ids_shown", "logprobs_shown"),
    [
        ({}, False, False),
        ({"return_token_ids": False, "logprobs": False}, False, False),
        ({"return_token_ids": True}, True, False),
        ({"logprobs": True}, False, True),
        ({"return_token_ids": True, "logprobs": True}, True, True),
    ],
)
async def test_the_agent_sees_exactly_what_it_asked_for(
    harness: GatewayHarness, options: dict[str, Any], ids_shown: bool, logprobs_shown: bool
) -> None:
    _, body = await harness.ask(**options)
    sent = harness.model.calls[0].reply
    assert sent is not None
    expected = {**sent, "choices": [dict(sent["choices"][0])]}
    if not ids_shown:
        del expected["prompt_token_ids"], expected["choices"][0]["token_ids"]
    if not logprobs_shown:
        expected["choices"][0]["logprobs"] = None
    assert body == expected


async def test_the_engine_is_asked_for_ids_and_logprobs_and_else_gets_the_request_as_it_was(
    harness: GatewayHarness,
) -> None:
    await harness.ask("hi", temperature=0.3, made_up={"x": [1, 2]})
    assert harness.model.calls[0].request == {
        "model": "policy",
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0.3,
        "made_up": {"x": [1, 2]},
        "return_token_ids": True,
        "logprobs": True,
    }


async def test_an_engine_without_token_ids_is_recorded_as_such_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async with GatewayHarness(ModelServer(tokens=False)) as harness:
        with caplog.at_level(logging.WARNING):
            assert [(await harness.ask())[0] for _ in range(2)] == [200, 200]
        assert await harness.states() == ["no_tokens", "no_tokens"]
    [warning] = [record.getMessage() for record in caplog.records]
    assert "'policy' returns no token ids" in warning
    assert "return_token_ids" in warning
    assert "Only the training of weights needs token ids." in warning


@pytest.mark.parametrize("field", ["return_token_ids", "logprobs"])
async def test_an_engine_that_refuses_a_field_of_ours_is_asked_without_it(field: str) -> None:
    async with GatewayHarness(ModelServer(refused_fields=(field,))) as harness:
        assert [(await harness.ask())[0] for _ in range(2)] == [200, 200]
        assert [field in call.request for call in harness.model.calls] == [True, False, False]
        states = await harness.states()
    assert states == (["no_tokens"] * 2 if field == "return_token_ids" else ["ok"] * 2)


async def test_a_field_that_the_agent_itself_sent_is_its_own_to_hear_about() -> None:
    async with GatewayHarness(ModelServer(refused_fields=("logprobs",))) as harness:
        status, body = await harness.ask(logprobs=True)
        assert status == 400
        assert body["error"]["param"] == "logprobs"
        assert len(harness.model.calls) == 1


async def test_calls_get_their_number_when_they_arrive(harness: GatewayHarness) -> None:
    attempt = await harness.attempt()
    harness.model.hold()
    call = asyncio.create_task(harness.ask(of=attempt))
    await harness.model.until(arrived(1))
    later = await harness.store.add_many_spans(
        [
            Span.from_attributes(
                attributes={"agentlightning.reward.0.value": 1.0},
                rollout_id=attempt.rollout_id,
                attempt_id=attempt.attempt.attempt_id,
                sequence_id=-1,
            )
        ]
    )
    harness.model.release()
    await call
    numbers = {span.name: span.sequence_id for span in await harness.spans(attempt)}
    assert numbers["raw_gen_ai_request"] == 1 < later[0].sequence_id


async def test_a_part_too_big_to_keep_is_recorded_as_its_hash_and_size(harness: GatewayHarness) -> None:
    huge = "x" * (KEPT_BYTES + 1)
    status, _ = await harness.ask(huge)
    assert status == 200
    assert len(harness.model.calls[0].request["messages"][0]["content"]) == len(huge)
    text = str((await harness.spans())[0].attributes["gen_ai.prompt.0.content"])
    assert text == f"[not kept: {len(huge)} bytes, sha256 {hashlib.sha256(huge.encode()).hexdigest()}]"
    assert await harness.states() == ["ok"]


async def test_message_parts_are_kept_as_json(harness: GatewayHarness) -> None:
    parts = [{"type": "text", "text": "größe?"}]
    body = {"model": "policy", "messages": [{"role": "user", "content": parts}]}
    harness.model.answer = lambda _: "large"
    assert (await harness.post("/chat/completions", body))[0] == 200
    assert (await harness.spans())[0].attributes["gen_ai.prompt.0.content"] == '[{"type": "text", "text": "größe?"}]'


async def test_odd_content_is_recorded_as_far_as_text_can_hold_it(harness: GatewayHarness) -> None:
    body = (
        b'{"model": "policy", "seed": NaN, "messages": [{"role": "user", "content": "half \\ud83d pair"}, {"role": 3}]}'
    )
    assert (await harness.post("/chat/completions", body))[0] == 200
    attributes = (await harness.spans())[0].attributes
    assert attributes["gen_ai.prompt.0.content"] == "half ? pair"
    assert attributes["gen_ai.prompt.1.role"] == "3"


async def test_a_choice_without_tokens_is_no_tokens_beside_one_that_has_them(harness: GatewayHarness) -> None:
    choices = [{"index": i, "token_ids": [i + 5], "finish_reason": "stop", "message": {"content": "x"}} for i in (0, 1)]
    del choices[1]["token_ids"]
    reply = {"id": "c", "prompt_token_ids": [1], "choices": choices}
    harness.model.faults.append(Fault(body=json.dumps(reply).encode()))
    await harness.ask(n=2)
    assert await harness.states() == ["ok", "no_tokens"]
    assert (await harness.raw())[0]["completion_token_ids"] == [5]


async def test_many_choices_find_room_together(harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "KEPT_BYTES", 2**20)
    choices = [
        {"index": i, "token_ids": [i] * 300, "finish_reason": "stop", "message": {"content": "x" * 20_000}}
        for i in range(60)
    ]
    reply = {"id": "c", "prompt_token_ids": [1] * 500, "choices": choices}
    harness.model.faults.append(Fault(body=json.dumps(reply).encode()))
    await harness.ask(n=60)
    calls = await harness.raw()
    assert [call["completion_token_ids"] for call in calls] == [[i] * 300 for i in range(60)]
    assert sum(len(span.model_dump_json()) for span in await harness.spans()) < 1.2 * 2**20


async def test_of_several_prompts_each_choice_has_its_own(harness: GatewayHarness) -> None:
    choices = [{"index": i, "token_ids": [i], "prompt_token_ids": [i // 2], "text": f"t{i}"} for i in range(6)]
    harness.model.faults.append(Fault(body=json.dumps({"id": "c", "choices": choices}).encode()))
    body = {"model": "policy", "prompt": ["a", "b", "c"], "n": 2}
    assert (await harness.post("/completions", body))[0] == 200
    records = [span.attributes for span in (await harness.spans())[::2]]
    assert [attributes["gen_ai.prompt.0.content"] for attributes in records] == [*"aabbcc"]
    assert ["gen_ai.prompt.1.content" in attributes for attributes in records] == [False] * 6
    assert [call["prompt_token_ids"] for call in await harness.raw()] == [[0], [0], [1], [1], [2], [2]]


def test_a_record_of_many_prompts_grows_with_their_number() -> None:
    prompts = DIALECTS["completions"].prompt_of({"prompt": ["hi"] * 2000})
    call = GatewayCall("r", "a", 1, dialect="completions", prompt=prompts, request={"model": "policy"})
    choices: list[Any] = [{"index": i, "text": "x", "message": {"content": "x"}} for i in range(2000)]
    call.answered({"id": "c", "choices": choices}, None)
    assert sum(len(span.attributes) for span in spans_of(call)) < 30 * 2000


async def test_a_store_behind_http_keeps_the_same_spans() -> None:
    server = LightningStoreServer(InMemoryLightningStore(), port=0)
    await server.start()
    async with GatewayHarness(store=server) as harness:
        assert (await harness.ask())[0] == 200
        assert await harness.states() == ["ok"]
        request, raw = await harness.spans()
        assert Span.model_validate(raw.model_dump()) == raw
        assert raw.parent_id == request.span_id
    await server.stop()


@pytest.mark.parametrize(
    ("request_fields", "named"),
    [
        ({}, []),
        ({"temperature": 0.3, "n": 2, "stop": ["a"], "max_tokens": 4, "seed": 1}, []),
        ({"temperature": 0}, ["temperature"]),
        ({"temperature": 0.0, "top_p": 0.5}, ["temperature", "top_p"]),
        ({"temperature": None}, []),
        ({"top_p": 1, "top_k": -1, "min_p": 0, "logit_bias": {}, "repetition_penalty": 1.0, "min_tokens": 0}, []),
        ({"top_p": 0.9, "top_k": 5, "presence_penalty": -1}, ["presence_penalty", "top_k", "top_p"]),
        ({"tool_choice": "auto"}, []),
        ({"tool_choice": "none"}, []),
        ({"tool_choice": "required"}, ["tool_choice"]),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, ["tool_choice"]),
        ({"tool_choice": {"type": "auto"}}, []),  # Anthropic's forms
        ({"tool_choice": {"type": "any"}}, ["tool_choice"]),
        ({"tool_choice": {"type": "tool", "name": "f"}}, ["tool_choice"]),
        ({"response_format": {"type": "text"}}, []),
        ({"response_format": {"type": "json_object"}}, ["response_format"]),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, ["text.format"]),  # the Responses API
        ({"structured_outputs": {"regex": "a"}}, ["structured_outputs"]),  # vLLM's form
        ({"logit_bias": {"5": 1}, "response_format": "nonsense", "text": 3}, ["logit_bias"]),
    ],
)
def test_what_changes_the_distribution_is_named(request_fields: dict[str, Any], named: list[str]) -> None:
    assert constrained_by(request_fields) == named
