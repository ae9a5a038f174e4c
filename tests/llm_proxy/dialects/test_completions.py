"""Text completions, embeddings and the list of models, with OpenAI's client library; and calls with several choices."""

from __future__ import annotations

import ast
import json
from typing import Any

import openai
import pytest

from agentlightning.adapter import LlmProxyTraceToTriplet, TracerTraceToTriplet, TraceToMessages
from agentlightning.adapter.calls.calls import model_calls
from agentlightning.adapter.rows.samples import unusable
from agentlightning.training.ledger import read_rollout
from tests.llm_proxy.agents import Agent, TextAgent
from tests.llm_proxy.harness import HI, REQUESTS
from tests.llm_proxy.test_policies import reward_of
from tests.stubs.model_server import Fault, encode, logprobs_of

Json = dict[str, Any]
TEXT = "Two  spaces\n\n    and e\u0301 \U0001f600"


AGENT = TextAgent


# --- text completions ------------------------------------------------------------------------------------------------


async def test_a_completion_is_recorded_with_its_text_and_the_engines_tokens(agent: Agent) -> None:
    agent.harness.model.answer = lambda request: TEXT
    reply = await agent.ask()
    (choice,) = reply.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (TEXT, "stop", None)
    assert "token_ids" not in reply.to_json()
    attributes, call = await agent.recorded()
    assert (attributes["llm.request.type"], attributes["gen_ai.prompt.0.role"]) == ("completion", "user")
    assert (attributes["gen_ai.completion.0.role"], attributes["gen_ai.completion.0.content"]) == ("assistant", TEXT)
    assert call["completion_token_ids"] == encode(TEXT)


@pytest.mark.parametrize("streams", [True, False])
async def test_a_stream_of_several_choices_is_put_together_by_their_numbers(agent: Agent, streams: bool) -> None:
    agent.harness.model.streams = streams
    agent.harness.model.answer = lambda request: TEXT
    texts = {0: "", 1: ""}
    name = ""
    async for chunk in await agent.ask(stream=True, n=2, logprobs=1):
        name = chunk.id
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            assert choice.logprobs is None or len(choice.logprobs.tokens) > 0
    assert texts == {0: TEXT, 1: f"{TEXT} 1"}
    calls = await agent.harness.raw()
    records = [span.attributes for span in await agent.harness.spans() if span.name == "litellm_request"]
    assert [one["gen_ai.response.id"] for one in records] == [name, f"{name}#1"]
    assert [one["gen_ai.completion.0.content"] for one in records] == list(texts.values())
    assert [call["completion_token_ids"] for call in calls] == [encode(text) for text in texts.values()]
    assert [call["completion_logprobs"] for call in calls] == [logprobs_of(encode(text)) for text in texts.values()]
    assert [call["prompt_token_ids"] for call in calls] == [encode("once upon")] * 2
    assert [(call["choice"], call["choices"]) for call in calls] == [(0, 2), (1, 2)]


@pytest.mark.parametrize("logprobs", [None, 0, 1, 3])
async def test_an_agent_gets_as_many_logprobs_as_it_asked_for(agent: Agent, logprobs: int | None) -> None:
    reply = await agent.ask(**({} if logprobs is None else {"logprobs": logprobs}))
    assert agent.harness.model.calls[0].request["logprobs"] == (1 if logprobs is None else logprobs)
    assert (reply.choices[0].logprobs is None) == (logprobs is None)
    _, call = await agent.recorded()
    assert len(call["completion_logprobs"]) == len(call["completion_token_ids"])


@pytest.mark.parametrize(
    ("prompt", "shown", "ids"),
    [
        (["once upon", "a time"], ["once upon", "a time"], [encode("once upon"), encode("a time")]),
        ([7, 8, 9], ["[7, 8, 9]"], [[7, 8, 9]]),
        ([[7, 8], [9]], ["[7, 8]", "[9]"], [[7, 8], [9]]),
    ],
)
async def test_each_prompt_is_the_message_of_a_record_of_its_own(
    agent: Agent, prompt: Any, shown: list[str], ids: list[list[int]]
) -> None:
    reply = await agent.ask(prompt=prompt)
    calls = await agent.harness.raw()
    records = [span.attributes for span in (await agent.harness.spans())[::2]]
    assert [attributes["gen_ai.prompt.0.content"] for attributes in records] == shown
    assert not any("gen_ai.prompt.1.content" in attributes for attributes in records)
    assert [call["prompt_token_ids"] for call in calls] == ids
    assert [call["completion_token_ids"] for call in calls] == [encode(choice.text) for choice in reply.choices]


async def test_the_ids_of_the_prompt_may_stand_beside_the_choices(agent: Agent) -> None:
    choice = {"index": 0, "text": "x", "token_ids": [5], "finish_reason": "stop"}
    reply = json.dumps({"id": "c", "prompt_token_ids": [1, 2], "choices": [choice]})
    agent.harness.model.faults = [Fault(body=reply.encode())]
    await agent.ask()
    _, call = await agent.recorded()
    assert (call["prompt_token_ids"], call["completion_token_ids"]) == ([1, 2], [5])


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"extra_body": {"prompt": 3}}, "prompt"), ({"extra_body": {"model": 3}}, "model"), ({"model": "x"}, "model")],
)
async def test_a_bad_request_is_the_librarys_own_error(agent: Agent, fields: Json, param: str) -> None:
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as caught:
        await agent.ask(**fields)
    assert caught.value.param == param
    assert await agent.harness.states() == ["refused"]


# --- embeddings and models -------------------------------------------------------------------------------------------


async def _embed(agent: Agent, **fields: Any) -> Any:
    return await agent.client.embeddings.create(**{"model": "policy", "input": ["a word", "two"], **fields})


async def test_embeddings_pass_and_are_recorded_without_a_warning(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    reply = await _embed(agent)
    assert [entry.embedding for entry in reply.data] == [[0.25, 0.0], [0.25, 1.0]]
    attributes, call = await agent.recorded()
    assert attributes["llm.request.type"] == "embedding"
    assert [attributes[f"gen_ai.prompt.{index}.content"] for index in (0, 1)] == ["a word", "two"]
    assert attributes["gen_ai.usage.prompt_tokens"] == 3
    assert not any(key.startswith("gen_ai.completion") for key in attributes)
    assert (call["state"], call["dialect"]) == ("no_generation", "embeddings")
    assert "return_token_ids" not in agent.harness.model.calls[0].request
    assert caplog.records == []


async def test_readers_do_not_take_an_embedding_for_a_lost_sample(agent: Agent) -> None:
    await _embed(agent)
    await agent.ask()
    spans = await agent.harness.spans()
    for adapter in (TracerTraceToTriplet(), LlmProxyTraceToTriplet()):
        (triplet,) = adapter.adapt(spans)
        assert triplet.response["token_ids"] == encode("you said once upon")
    (conversation,) = TraceToMessages().adapt(spans)
    assert [message["content"] for message in conversation["messages"]] == ["once upon", "you said once upon"]
    assert [call.state for call in model_calls(spans)] == ["no_generation", "ok"]
    assert [unusable(call) for call in model_calls(spans)] == ["no_generation", None]
    record = read_rollout(agent.attempt, [agent.attempt.attempt], spans)
    assert list(record.exclusions.values()) == ["no_generation", "unfinished"]


@pytest.mark.parametrize("status", [400, 500])
async def test_a_refusal_of_an_embedding_is_the_librarys_own_error(agent: Agent, status: int) -> None:
    agent.harness.model.faults = [Fault(status)]
    with pytest.raises(openai.APIStatusError, match=f"told to answer {status}"):
        await _embed(agent)
    assert await agent.harness.states() == ["upstream_error"]


async def test_a_reply_that_is_no_embedding_is_502_and_says_what_was_expected(agent: Agent) -> None:
    agent.harness.model.faults = [Fault(body=b'{"choices": []}')]
    with pytest.raises(openai.InternalServerError, match=r"not valid for embeddings \(expected: JSON with a list"):
        await _embed(agent)


# --- several choices, and the text form ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_each_of_several_choices_is_recorded_as_a_call_and_is_a_row(agent: Agent, stream: bool) -> None:
    reply = await agent.client.chat.completions.create(model="policy", messages=HI, n=3, stream=stream)
    if stream:
        async for _ in reply:
            pass
    texts, spans = ["you said hi", "you said hi 1", "you said hi 2"], await agent.harness.spans()
    raws, requests = spans[1::2], spans[::2]
    assert [span.name for span in requests] == ["litellm_request"] * 3
    assert [raw.parent_id for raw in raws] == [span.span_id for span in requests]
    assert {span.sequence_id for span in spans} == {1}
    choice_lists = [ast.literal_eval(str(raw.attributes["llm.hosted_vllm.choices"])) for raw in raws]
    assert [[(one["index"], one["token_ids"]) for one in choices] for choices in choice_lists] == [
        [(place, encode(text))] for place, text in enumerate(texts)
    ]
    assert [span.attributes["gen_ai.completion.0.content"] for span in requests] == texts
    assert ["gen_ai.usage.completion_tokens" in span.attributes for span in requests] == [not stream, False, False]

    problems: list[Any] = []
    calls = model_calls(spans, problems)
    assert (problems, len({call.call_id for call in calls})) == ([], 3)
    assert [call.completion_token_ids for call in calls] == [encode(text) for text in texts]
    assert [call.logprobs for call in calls] == [logprobs_of(encode(text)) for text in texts]
    for adapter in (TracerTraceToTriplet(), LlmProxyTraceToTriplet()):
        assert [triplet.response["token_ids"] for triplet in adapter.adapt(spans)] == [encode(text) for text in texts]
    store, name = agent.harness.store, agent.attempt.rollout_id
    await store.update_attempt(name, "latest", status="succeeded")
    rollout, attempts = await store.get_rollout_by_id(name), await store.query_attempts(name)
    assert rollout is not None
    record = read_rollout(rollout, attempts, [*spans, reward_of(agent.attempt)])
    prompt = calls[0].prompt_token_ids
    assert [row.token_ids for row in record.samples] == [prompt + encode(text) for text in texts]
    assert record.exclusions == {}
    assert agent.harness.proxy.stats()["calls"] == {"ok": 1}


async def test_a_call_with_one_choice_says_nothing_of_their_number(agent: Agent) -> None:
    await agent.client.chat.completions.create(model="policy", messages=HI)
    assert "choices" not in (await agent.recorded())[1]


@pytest.mark.parametrize("route", ["chat/completions", "completions", "messages", "responses"])
@pytest.mark.parametrize("stream", [True, False])
async def test_the_text_form_is_to_the_letter_what_older_adapters_read(agent: Agent, route: str, stream: bool) -> None:
    agent.harness.model.answer = lambda request: "forty two"
    body = {**REQUESTS[route], "stream": stream}
    async with agent.harness.session.post(agent.harness.url(f"/v1/{route}"), json=body) as reply:
        assert reply.status == 200
        await reply.read()
    parent, raw = await agent.harness.spans()
    prompt = encode("hi" if route == "completions" else "user hi assistant")
    name = parent.attributes["gen_ai.response.id"]
    older = {key: value for key, value in raw.attributes.items() if key.startswith("llm.")}
    first, second = encode("forty two")
    assert older == {
        "llm.hosted_vllm.id": name,
        "llm.hosted_vllm.model": "policy",
        "llm.hosted_vllm.prompt_token_ids": str(prompt),
        "llm.hosted_vllm.choices": f"[{{'index': 0, 'token_ids': [{first}, {second}], 'finish_reason': 'stop'}}]",
    }
    assert (parent.name, raw.name, raw.parent_id) == ("litellm_request", "raw_gen_ai_request", parent.span_id)
    typed = {key: value for key, value in raw.attributes.items() if not key.startswith("agentlightning.")}
    (triplet,) = LlmProxyTraceToTriplet().adapt([raw.model_copy(update={"attributes": typed})])
    assert triplet.prompt == {"token_ids": prompt}
    assert triplet.response["token_ids"] == [first, second]
    assert triplet.metadata["response_id"] == name
