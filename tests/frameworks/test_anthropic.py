"""The anthropic package: messages; plain, streamed and asynchronous; tools and its tool runner; its own tracing."""

from __future__ import annotations

from typing import Any

from opentelemetry import trace

import agentlightning as agl
from tests.frameworks import suite
from tests.frameworks.engine import Json, thinking
from tests.frameworks.harness import TaskResult
from tests.frameworks.suite import PARAMETERS, Product, address, keeps, needs
from tests.frameworks.suite import multiply as product_of

anthropic = needs("anthropic")

TOOL: Json = {"name": "multiply", "description": "a times b", "input_schema": PARAMETERS}


def results_of(message: Any) -> list[Json]:
    """Return the result of each tool call of a message."""
    calls = [block for block in message.content if block.type == "tool_use"]
    return [
        {"type": "tool_result", "tool_use_id": block.id, "content": str(product_of(**block.input))} for block in calls
    ]


def text_of(blocks: Any) -> str:
    return "".join(block.text for block in blocks if block.type == "text")


def messages(task: str, llm: agl.LLM) -> str:
    client = anthropic.Anthropic(**address(llm))
    history: list[Any] = [{"role": "user", "content": task}]
    while True:
        message = client.messages.create(
            model=llm.model, max_tokens=200, system="Use the tool.", messages=history, tools=[TOOL]
        )
        history.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            return text_of(message.content)
        history.append({"role": "user", "content": results_of(message)})


test_a_tool_loop = keeps(suite.TOOL_LOOP, suite.SEVERAL_TOOLS, direct=False)(messages)


@keeps(suite.TOOL_LOOP, model=thinking, rows=[3], direct=False)
async def test_a_loop_of_a_model_that_thinks(task: str, llm: agl.LLM) -> str:
    history: list[Any] = [{"role": "user", "content": task}]
    async with anthropic.AsyncAnthropic(**address(llm)) as client:
        options: Json = {"model": llm.model, "max_tokens": 2000, "tools": [TOOL]}
        options["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        for streamed in (True, False, True):
            if streamed:
                async with client.messages.stream(messages=history, **options) as stream:
                    message = await stream.get_final_message()
            else:
                message = await client.messages.create(messages=history, **options)
            # as programs do that send text in place of a thought whose signature is missing
            blocks = [block for block in message.content if block.type != "thinking" or block.signature]
            history.append({"role": "assistant", "content": blocks})
            history.append({"role": "user", "content": results_of(message) or "Are you sure?"})
    return text_of(history[3]["content"])


def two_recordings_of_one_call(result: TaskResult) -> None:
    (solve,), own = result.named("solve"), result.named("anthropic.messages.create")
    assert [span.attributes["gen_ai.response.id"] for span in own] == [one.reply["id"] for one in result.exchanges]
    assert [span.parent_id for span in own] == [solve.span_id] * 2
    assert [above[-1] for above in result.above_calls()] == ["solve"] * 2


@keeps(suite.TOOL_LOOP, direct=False, also=two_recordings_of_one_call)
def test_the_librarys_own_spans_and_the_gateways_records(task: str, llm: agl.LLM) -> str:
    with trace.get_tracer("a program of its own").start_as_current_span("solve"):
        return messages(task, llm)


@keeps(suite.WORDS, direct=False)
async def test_streams_of_messages(task: str, llm: agl.LLM) -> Json:
    history: list[Any] = [{"role": "user", "content": task}]
    options: Json = {"model": llm.model, "max_tokens": 200, "tools": [TOOL]}
    async with anthropic.AsyncAnthropic(**address(llm)) as client:
        async with client.messages.stream(messages=history, **options) as stream:
            first = await stream.get_final_message()
        history += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results_of(first)}]
        async with client.messages.stream(messages=history, **options) as stream:
            words = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
    assert final.stop_reason == "end_turn"
    usages = (first.usage, final.usage)
    return {"words": words, "used": sum(one.input_tokens + one.output_tokens for one in usages)}


@keeps(suite.TOOL_LOOP, direct=False, options={"refused": 1})  # it asks for a server that remembers, once
def test_the_tool_runner(task: str, llm: agl.LLM) -> str:
    @anthropic.beta_tool
    def multiply(a: int, b: int) -> str:
        """Return a times b."""
        return str(product_of(a, b))

    runner = anthropic.Anthropic(**address(llm)).beta.messages.tool_runner(
        model=llm.model, max_tokens=200, tools=[multiply], messages=[{"role": "user", "content": task}]
    )
    return text_of(runner.until_done().content)


@keeps(suite.PARSED, direct=False)
def test_structured_output(task: str, llm: agl.LLM) -> Product:
    history: list[Any] = [{"role": "user", "content": task}]
    client = anthropic.Anthropic(**address(llm))
    return client.messages.parse(model=llm.model, max_tokens=200, messages=history, output_format=Product).parsed_output
