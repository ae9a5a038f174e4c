"""The openai package: chat completions and responses; plain, streamed and asynchronous; tools; parsed answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import agentlightning as agl
from tests.frameworks import suite
from tests.frameworks.engine import Engine, Json, calculator, thinking
from tests.frameworks.harness import TASKS, TaskResult
from tests.frameworks.suite import (
    PARAMETERS,
    SAID,
    STYLES,
    Product,
    Promise,
    address,
    keeps,
    multiply,
    needs,
    rollout_of,
)

openai = needs("openai")

FUNCTION: Json = {"name": "multiply", "description": "a times b", "parameters": PARAMETERS}
TOOL: Json = {"type": "function", "function": FUNCTION}
FLAT_TOOL: Json = {"type": "function", "strict": True, **FUNCTION}


def product_of(arguments: str) -> str:
    return str(multiply(**json.loads(arguments)))


# --- chat completions ------------------------------------------------------------------------------------------------


def chat(task: str, llm: agl.LLM) -> str | None:
    client = openai.OpenAI(**address(llm))
    messages: list[Any] = [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": task}]
    while True:
        completion = client.chat.completions.create(model=llm.model, messages=messages, tools=[TOOL], temperature=0.5)
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": product_of(call.function.arguments)})


test_a_tool_loop_over_chat_completions = keeps(suite.TOOL_LOOP)(chat)


def arrives_piece_by_piece(result: TaskResult) -> None:
    *words, usage, product, reason = result.output
    assert "".join(word or "" for word in words) == "Some large number, I guess."
    assert len(words) > 5
    assert usage == result.exchanges[0].reply["usage"] | {k: None for k in usage if k.endswith("_details")}
    assert (product, reason) == ("42" if "6" in result.task else "72", "tool_calls")


@keeps(
    Promise("streams", rows=[2], also=arrives_piece_by_piece),
    model=lambda request: calculator(request) if request["messages"][1:] else "Some large number, I guess.",
)
async def test_streams_of_chat_completions(task: str, llm: agl.LLM) -> list[Any]:
    client = openai.AsyncOpenAI(**address(llm))
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
                pieces.append(product_of(event.arguments))
        final = await events.get_final_completion()
    pieces.append(final.choices[0].finish_reason)
    await client.close()
    return pieces


@keeps(suite.PARSED, on={"chat": True, "responses": False})
def test_structured_output(task: str, llm: agl.LLM, over_chat: bool) -> Product | None:
    client = openai.OpenAI(**address(llm))
    if not over_chat:
        return client.responses.parse(model=llm.model, input=task, text_format=Product).output_parsed
    messages: list[Any] = [{"role": "developer", "content": "Multiply."}, {"role": "user", "content": task}]
    completion = client.chat.completions.parse(model=llm.model, messages=messages, response_format=Product)
    return completion.choices[0].message.parsed


@keeps(suite.IN_STYLES)
async def test_calls_made_side_by_side(task: str, llm: agl.LLM) -> list[str | None]:
    async with openai.AsyncOpenAI(**address(llm)) as client:

        async def ask(style: str) -> str | None:
            messages: list[Any] = [{"role": "user", "content": f"{task} Answer {style}."}]
            return (await client.chat.completions.create(model=llm.model, messages=messages)).choices[0].message.content

        return list(await asyncio.gather(*map(ask, STYLES)))


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
        trainer.dev(rollout_of(chat), TASKS)
        assert engine.trouble == []
    assert trainer.result.rewards == [1.0, 1.0]
    assert len(engine.calls) == 4


# --- responses -------------------------------------------------------------------------------------------------------


def results_of(response: Any) -> list[Any]:
    """Return the result of each call of a tool in a response."""
    calls = [item for item in response.output if item.type == "function_call"]
    return [
        {"type": "function_call_output", "call_id": call.call_id, "output": product_of(call.arguments)}
        for call in calls
    ]


def whole(task: str, llm: agl.LLM, keep: Any = lambda item: item, **options: Any) -> str:
    """Send the whole conversation each time, of whose answers each item is what `keep` makes of it."""
    client = openai.OpenAI(**address(llm))
    items: list[Any] = [{"role": "user", "content": task}]
    while True:
        arguments: Json = {"instructions": "Use the tool.", "store": False, **options}
        response = client.responses.create(model=llm.model, input=items, tools=[FLAT_TOOL], **arguments)
        results = results_of(response)
        if not results:
            return response.output_text
        items += [*map(keep, response.output), *results]


def sealed(task: str, llm: agl.LLM) -> str:
    """Return the part of a thought that a program has to keep."""

    def keep(item: Any) -> Any:
        reasoning = {"type": "reasoning", "id": item.id, "summary": []}
        return {**reasoning, "encrypted_content": item.encrypted_content} if item.type == "reasoning" else item

    return whole(task, llm, keep, include=["reasoning.encrypted_content"])


def by_id(task: str, llm: agl.LLM) -> str:
    client = openai.OpenAI(**address(llm))
    options: Json = {"model": llm.model, "instructions": "Use the tool.", "tools": [FLAT_TOOL]}
    response = client.responses.create(input=task, **options)
    while results := results_of(response):
        response = client.responses.create(input=results, previous_response_id=response.id, **options)
    return response.output_text


def by_reference(task: str, llm: agl.LLM) -> str:
    client = openai.OpenAI(**address(llm))
    items: list[Any] = [{"role": "user", "content": task}]
    while True:
        with client.responses.stream(model=llm.model, input=items, tools=[FLAT_TOOL]) as stream:
            for _ in stream:
                pass
            response = stream.get_final_response()
        results = results_of(response)
        if not results:
            return response.output_text
        items += [*({"type": "item_reference", "id": item.id} for item in response.output), *results]


LOOPS = {f"responses {loop.__name__}": loop for loop in (whole, by_id, by_reference, sealed)}


@keeps(suite.TOOL_LOOP, suite.TOOL_LOOP.but(name="thinking", model=thinking), on=LOOPS)
def test_a_loop_over_responses(task: str, llm: agl.LLM, loop: Any) -> str:
    return loop(task, llm)


@keeps(suite.WORDS, direct=False)
async def test_streams_of_responses(task: str, llm: agl.LLM) -> Json:
    client = openai.AsyncOpenAI(**address(llm))
    items: list[Any] = [{"role": "user", "content": task}]
    async with client.responses.stream(model=llm.model, input=items, tools=[FLAT_TOOL]) as stream:
        arguments = [e.arguments async for e in stream if e.type == "response.function_call_arguments.done"]
        first = await stream.get_final_response()
    assert [product_of(one) for one in arguments] == [result["output"] for result in results_of(first)]
    items += [*first.output, *results_of(first)]
    stream = await client.responses.create(model=llm.model, input=items, tools=[FLAT_TOOL], stream=True)
    events = [event async for event in stream]
    await client.close()
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    words = [event.delta for event in events if event.type == "response.output_text.delta"]
    return {"words": words, "used": first.usage.total_tokens + events[-1].response.usage.total_tokens}
