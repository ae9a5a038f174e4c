"""The anthropic package: messages; plain, streamed and asynchronous; tools and its tool runner; its own tracing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from opentelemetry import trace
from pydantic import BaseModel

import agentlightning as agl
from tests.frameworks.engine import Json, both_ways, calculator, numbers
from tests.frameworks.harness import run_agent

anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed: make test-frameworks")

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOL: Json = {"name": "multiply", "description": "a times b", "input_schema": SCHEMA}
SAID = ["It is 42, no doubt.", "It is 72, no doubt."]


@agl.rollout
def messages(task: str, llm: agl.LLM) -> str:
    client = anthropic.Anthropic(base_url=llm.get_base_url(), api_key=llm.api_key)
    history: list[Any] = [{"role": "user", "content": task}]
    while True:
        message = client.messages.create(
            model=llm.model, max_tokens=200, system="Use the tool.", messages=history, tools=[TOOL]
        )
        history.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            return "".join(block.text for block in message.content if block.type == "text")
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": str(block.input["a"] * block.input["b"])}
            for block in message.content
            if block.type == "tool_use"
        ]
        history.append({"role": "user", "content": results})


def test_a_tool_loop_over_messages_is_one_row() -> None:
    results = run_agent(messages, direct=False)
    assert [one.output for one in results] == SAID
    assert [len(one.exchanges) for one in results] == [2, 2]
    assert [len(one.record.samples) for one in results] == [1, 1]


def test_several_tool_calls_at_once_are_one_row() -> None:
    results = run_agent(messages, both_ways, direct=False)
    assert [one.output for one in results] == ["It is 42 and 42.", "It is 72 and 72."]
    assert [len(one.record.samples) for one in results] == [1, 1]


def thinker(request: Json) -> str | Json:
    """A model that thinks before it uses its tool, and before it answers."""
    answer = calculator(request)
    return {"reasoning_content": "Let me  see.", **({"content": answer} if isinstance(answer, str) else answer)}


@agl.rollout
async def thinking(task: str, llm: agl.LLM) -> str:
    history: list[Any] = [{"role": "user", "content": task}]
    async with anthropic.AsyncAnthropic(base_url=llm.get_base_url(), api_key=llm.api_key) as client:
        options: Json = {"model": llm.model, "max_tokens": 2000, "tools": [TOOL]}
        options["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        for streamed in (True, False, True):
            if streamed:
                async with client.messages.stream(messages=history, **options) as stream:
                    message = await stream.get_final_message()
            else:
                message = await client.messages.create(messages=history, **options)
            # as programs do that send text in place of a thought whose signature is missing
            kept = [block for block in message.content if block.type != "thinking" or block.signature]
            history.append({"role": "assistant", "content": kept})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": str(block.input["a"] * block.input["b"])}
                for block in message.content
                if block.type == "tool_use"
            ]
            history.append({"role": "user", "content": results or "Are you sure?"})
    return "".join(block.text for block in history[3]["content"] if block.type == "text")


def test_a_loop_of_a_model_that_thinks_is_one_row() -> None:
    results = run_agent(thinking, thinker, direct=False)
    assert [one.output for one in results] == SAID
    assert [len(one.exchanges) for one in results] == [3, 3]
    assert [len(one.record.samples) for one in results] == [1, 1]


@agl.rollout
def traced(task: str, llm: agl.LLM) -> str:
    with trace.get_tracer("a program of its own").start_as_current_span("solve"):
        return messages(task, llm)


def test_the_librarys_own_spans_and_the_gateways_records_are_two_recordings_of_one_call() -> None:
    for result in run_agent(traced, direct=False):
        (solve,), own = result.named("solve"), result.named("anthropic.messages.create")
        assert [span.attributes["gen_ai.response.id"] for span in own] == [one.reply["id"] for one in result.exchanges]
        assert [span.parent_id for span in own] == [solve.span_id] * 2
        assert [above[-1] for above in result.above_calls()] == ["solve"] * 2


@agl.rollout
async def streams(task: str, llm: agl.LLM) -> tuple[list[str], str, int]:
    client = anthropic.AsyncAnthropic(base_url=llm.get_base_url(), api_key=llm.api_key)
    history: list[Any] = [{"role": "user", "content": task}]
    async with client.messages.stream(model=llm.model, max_tokens=200, messages=history, tools=[TOOL]) as stream:
        first = await stream.get_final_message()
    (call,) = first.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": str(call.input["a"] * call.input["b"])}
    history += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    async with client.messages.stream(model=llm.model, max_tokens=200, messages=history, tools=[TOOL]) as stream:
        words = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    await client.close()
    return words, final.stop_reason, final.usage.output_tokens


def test_streams_of_messages_are_complete_and_one_row() -> None:
    for result, answer in zip(run_agent(streams, direct=False), SAID, strict=True):
        words, reason, used = result.output
        assert "".join(words) == answer
        assert len(words) == len(answer.split())
        assert reason == "end_turn"
        assert used == result.exchanges[1].reply["usage"]["completion_tokens"]
        assert len(result.record.samples) == 1


@agl.rollout
def with_the_tool_runner(task: str, llm: agl.LLM) -> str:
    @anthropic.beta_tool
    def multiply(a: int, b: int) -> str:
        """Return a times b.

        Args:
            a: one number
            b: another
        """
        return str(a * b)

    client = anthropic.Anthropic(base_url=llm.get_base_url(), api_key=llm.api_key)
    runner = client.beta.messages.tool_runner(
        model=llm.model, max_tokens=200, tools=[multiply], messages=[{"role": "user", "content": task}]
    )
    return "".join(block.text for block in runner.until_done().content)


def test_the_tool_runner_is_one_row() -> None:
    results = run_agent(with_the_tool_runner, direct=False, refused=1)  # it asks for a server that remembers, once
    assert [one.output for one in results] == SAID
    assert [len(one.record.samples) for one in results] == [1, 1]


class Product(BaseModel):
    """An answer that can be parsed."""

    a: int
    b: int
    value: int


@agl.rollout
def parsed(task: str, llm: agl.LLM) -> Product:
    client = anthropic.Anthropic(base_url=llm.get_base_url(), api_key=llm.api_key)
    history: list[Any] = [{"role": "user", "content": task}]
    message = client.messages.parse(model=llm.model, max_tokens=200, messages=history, output_format=Product)
    return message.parsed_output


def test_structured_output_over_messages_is_parsed() -> None:
    def model(request: Json) -> str:
        assert request["response_format"]["json_schema"]["schema"]["required"] == ["a", "b", "value"]
        found = numbers(request)
        return json.dumps({**found, "value": found["a"] * found["b"]})

    results = run_agent(parsed, model, direct=False)
    assert [one.output for one in results] == [Product(a=6, b=7, value=42), Product(a=8, b=9, value=72)]
