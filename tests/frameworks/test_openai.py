"""The openai package: chat completions and responses; plain, streamed and asynchronous; tools; parsed answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import BaseModel

import agentlightning as agl
from tests.frameworks.engine import Engine, Json, calculator, numbers, said
from tests.frameworks.harness import TASKS, run_agent

openai = pytest.importorskip("openai", reason="openai is not installed: make test-frameworks")

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL: Json = {
    "type": "function",
    "function": {"name": "multiply", "description": "a times b", "parameters": PARAMETERS},
}
FLAT_TOOL: Json = {"type": "function", "strict": True, **TOOL["function"]}
SAID = ["It is 42, no doubt.", "It is 72, no doubt."]


class Product(BaseModel):
    """An answer that can be parsed."""

    a: int
    b: int
    value: int


def multiply(arguments: str) -> str:
    given = json.loads(arguments)
    return str(given["a"] * given["b"])


# --- chat completions ------------------------------------------------------------------------------------------------


@agl.rollout
def chat(task: str, llm: agl.LLM) -> str | None:
    client = openai.OpenAI(base_url=llm.get_base_url(), api_key=llm.api_key)
    messages: list[Any] = [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": task}]
    while True:
        completion = client.chat.completions.create(model=llm.model, messages=messages, tools=[TOOL], temperature=0.5)
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            result = multiply(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def test_a_tool_loop_over_chat_completions_is_one_row() -> None:
    results = run_agent(chat)
    assert [one.output for one in results] == SAID
    assert [len(one.exchanges) for one in results] == [2, 2]
    assert [len(one.record.samples) for one in results] == [1, 1]


@agl.rollout
async def chat_streams(task: str, llm: agl.LLM) -> list[Any]:
    client = openai.AsyncOpenAI(base_url=llm.get_base_url(), api_key=llm.api_key)
    pieces: list[Any] = []
    stream = await client.chat.completions.create(
        model=llm.model,
        messages=[{"role": "user", "content": task}],
        tools=[TOOL],
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        pieces.extend(choice.delta.content for choice in chunk.choices)
        if chunk.usage:
            pieces.append(chunk.usage.model_dump())
    history: list[Any] = [
        {"role": "user", "content": task},
        {"role": "assistant", "content": "".join(piece for piece in pieces if isinstance(piece, str))},
        {"role": "user", "content": "And with the tool?"},
    ]
    async with client.chat.completions.stream(model=llm.model, messages=history, tools=[TOOL]) as events:
        async for event in events:
            if event.type == "tool_calls.function.arguments.done":
                pieces.append(multiply(event.arguments))
        final = await events.get_final_completion()
    pieces.append(final.choices[0].finish_reason)
    await client.close()
    return pieces


def test_streams_of_chat_completions_arrive_piece_by_piece_and_are_one_row() -> None:
    def model(request: Json) -> str | Json:
        return "Some large number, I guess." if len(request["messages"]) == 1 else calculator(request)

    for task_result, product in zip(run_agent(chat_streams, model), ("42", "72"), strict=True):
        *words, usage, result, reason = task_result.output
        assert "".join(word or "" for word in words) == "Some large number, I guess."
        assert len(words) > 5
        assert usage == task_result.exchanges[0].reply["usage"] | {k: None for k in usage if k.endswith("_details")}
        assert (result, reason) == (product, "tool_calls")
        assert len(task_result.record.samples) == 1


@agl.rollout
def chat_parsed(task: str, llm: agl.LLM) -> Product | None:
    client = openai.OpenAI(base_url=llm.get_base_url(), api_key=llm.api_key)
    messages: list[Any] = [{"role": "developer", "content": "Multiply."}, {"role": "user", "content": task}]
    completion = client.chat.completions.parse(model=llm.model, messages=messages, response_format=Product)
    return completion.choices[0].message.parsed


def product(request: Json) -> str:
    """A model that answers in the form that it was told; fails if it was told none."""
    assert request["response_format"]["json_schema"]["schema"]["required"] == ["a", "b", "value"]
    found = numbers(request)
    return json.dumps({**found, "value": found["a"] * found["b"]})


def test_structured_output_over_chat_completions_is_parsed() -> None:
    assert [one.output for one in run_agent(chat_parsed, product)] == [
        Product(a=6, b=7, value=42),
        Product(a=8, b=9, value=72),
    ]


@agl.rollout
async def chat_side_by_side(task: str, llm: agl.LLM) -> list[str | None]:
    async with openai.AsyncOpenAI(base_url=llm.get_base_url(), api_key=llm.api_key) as client:

        async def ask(style: str) -> str | None:
            messages: list[Any] = [{"role": "user", "content": f"{task} Answer {style}."}]
            return (await client.chat.completions.create(model=llm.model, messages=messages)).choices[0].message.content

        return list(await asyncio.gather(*map(ask, ("tersely", "in verse", "in French", "at length"))))


def test_calls_made_side_by_side_are_each_a_row() -> None:
    def model(request: Json) -> str:
        return f"You asked: {said(request['messages'][-1])}"

    for result in run_agent(chat_side_by_side, model, in_order=False):
        assert [answer.rsplit(" ", 1)[1] for answer in result.output] == ["tersely.", "verse.", "French.", "length."]
        assert len(result.record.samples) == 4


def test_dev_runs_it_in_processes_of_its_own_with_a_gateway_in_ours() -> None:
    with Engine(calculator) as engine:
        proxy = agl.LLMProxy(model_list=[engine.entry("policy")])
        trainer = agl.Trainer(
            llm_proxy=proxy,
            initial_resources={"main_llm": proxy.as_resource()},
            strategy={"type": "cs", "server_port": 0},
            reward_fn=lambda output, task: float(output in SAID),
            n_runners=2,
        )
        trainer.dev(chat, TASKS)
        assert engine.trouble == []
    assert trainer.result.rewards == [1.0, 1.0]
    assert len(engine.calls) == 4


# --- responses -------------------------------------------------------------------------------------------------------


@agl.rollout
def responses(task: str, llm: agl.LLM) -> str:
    client = openai.OpenAI(base_url=llm.get_base_url(), api_key=llm.api_key)
    items: list[Any] = [{"role": "user", "content": task}]
    while True:
        response = client.responses.create(
            model=llm.model, instructions="Use the tool.", input=items, tools=[FLAT_TOOL], store=False
        )
        items += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        for call in calls:
            result = multiply(call.arguments)
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


def test_a_tool_loop_over_responses_is_one_row() -> None:
    results = run_agent(responses, direct=False)
    assert [one.output for one in results] == SAID
    assert [len(one.exchanges) for one in results] == [2, 2]
    assert [len(one.record.samples) for one in results] == [1, 1]


@agl.rollout
def responses_by_id(task: str, llm: agl.LLM) -> str:
    client = openai.OpenAI(base_url=llm.get_base_url(), api_key=llm.api_key)
    options: Json = {"model": llm.model, "instructions": "Use the tool.", "tools": [FLAT_TOOL]}
    response = client.responses.create(input=task, **options)
    while calls := [item for item in response.output if item.type == "function_call"]:
        outputs: list[Any] = [
            {"type": "function_call_output", "call_id": call.call_id, "output": multiply(call.arguments)}
            for call in calls
        ]
        response = client.responses.create(input=outputs, previous_response_id=response.id, **options)
    return response.output_text


@agl.rollout
async def responses_by_reference(task: str, llm: agl.LLM) -> str:
    items: list[Any] = [{"role": "user", "content": task}]
    async with openai.AsyncOpenAI(base_url=llm.get_base_url(), api_key=llm.api_key) as client:
        while True:
            async with client.responses.stream(model=llm.model, input=items, tools=[FLAT_TOOL]) as stream:
                response = await stream.get_final_response()
            items += [{"type": "item_reference", "id": item.id} for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return response.output_text
            for call in calls:
                result = multiply(call.arguments)
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


@pytest.mark.parametrize("agent", [responses_by_id, responses_by_reference])
def test_a_tool_loop_that_leans_on_the_servers_memory_is_one_row(agent: Any) -> None:
    results = run_agent(agent, direct=False)
    assert [one.output for one in results] == SAID
    assert [len(one.exchanges) for one in results] == [2, 2]
    assert [len(one.record.samples) for one in results] == [1, 1]


def thinker(request: Json) -> str | Json:
    """A model that thinks before it uses its tool, and before it answers."""
    answer = calculator(request)
    return {"reasoning_content": "Let me  see.", **({"content": answer} if isinstance(answer, str) else answer)}


@agl.rollout
def responses_sealed(task: str, llm: agl.LLM) -> str:
    client = openai.OpenAI(base_url=llm.get_base_url(), api_key=llm.api_key)
    items: list[Any] = [{"role": "user", "content": task}]
    while True:
        response = client.responses.create(
            model=llm.model, input=items, tools=[FLAT_TOOL], store=False, include=["reasoning.encrypted_content"]
        )
        for item in response.output:  # as programs do that keep of a thought what they are to keep
            kept = {"type": "reasoning", "id": item.id, "summary": []}
            sealed = item.type == "reasoning"
            items.append({**kept, "encrypted_content": item.encrypted_content} if sealed else item)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        for call in calls:
            result = multiply(call.arguments)
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


@pytest.mark.parametrize("agent", [responses, responses_by_id, responses_by_reference, responses_sealed])
def test_a_loop_of_a_model_that_thinks_is_one_row(agent: Any) -> None:
    results = run_agent(agent, thinker, direct=False)
    assert [one.output for one in results] == SAID
    assert [len(one.exchanges) for one in results] == [2, 2]
    assert [len(one.record.samples) for one in results] == [1, 1]


@agl.rollout
async def responses_streams(task: str, llm: agl.LLM) -> tuple[list[str], str, int]:
    client = openai.AsyncOpenAI(base_url=llm.get_base_url(), api_key=llm.api_key)
    items: list[Any] = [{"role": "user", "content": task}]
    async with client.responses.stream(model=llm.model, input=items, tools=[FLAT_TOOL]) as stream:
        async for event in stream:
            if event.type == "response.function_call_arguments.done":
                product = multiply(event.arguments)
        first = await stream.get_final_response()
    (call,) = first.output
    items += [call, {"type": "function_call_output", "call_id": call.call_id, "output": product}]
    kinds: list[str] = []
    text = ""
    async for event in await client.responses.create(model=llm.model, input=items, tools=[FLAT_TOOL], stream=True):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
        if event.type == "response.completed":
            used = event.response.usage.total_tokens
    await client.close()
    return kinds, text, used


def test_streams_of_responses_are_complete_and_one_row() -> None:
    for result, answer in zip(run_agent(responses_streams, direct=False), SAID, strict=True):
        kinds, text, used = result.output
        assert text == answer
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        assert kinds.count("response.output_text.delta") == len(answer.split())
        assert used == result.exchanges[1].reply["usage"]["total_tokens"]
        assert len(result.record.samples) == 1


@agl.rollout
def responses_parsed(task: str, llm: agl.LLM) -> Product | None:
    client = openai.OpenAI(base_url=llm.get_base_url(), api_key=llm.api_key)
    return client.responses.parse(model=llm.model, input=task, text_format=Product).output_parsed


def test_structured_output_over_responses_is_parsed() -> None:
    assert [one.output for one in run_agent(responses_parsed, product, direct=False)] == [
        Product(a=6, b=7, value=42),
        Product(a=8, b=9, value=72),
    ]
