"""smolagents: agents that write code and agents that call tools, streams, a manager, structured output."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import agentlightning as agl
from tests.frameworks.engine import Json, call, calls, last, numbers, offered, said
from tests.frameworks.harness import run_agent

pytest.importorskip("smolagents", reason="smolagents is not installed: make test-frameworks")

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool
from smolagents.monitoring import LogLevel

QUIET: Json = {"verbosity_level": LogLevel.OFF}


@tool
def multiply(a: int, b: int) -> int:
    """Return a times b.

    Args:
        a: one number
        b: another
    """
    return a * b


def model_of(llm: agl.LLM, **more: Any) -> Any:
    return OpenAIModel(llm.model, api_base=llm.get_base_url(), api_key=llm.api_key, **more)


def question(request: Json) -> Json:
    """Return the numbers of the task; examples in the system prompt have others."""
    own = [message for message in request["messages"] if message["role"] == "user" and "times" in said(message)]
    return numbers({"messages": own[-1:]})


def observed(request: Json, word: str) -> bool:
    return word in said(last(request))


def coding(request: Json) -> str:
    """A model that writes code twice: a step, and the end."""
    given = question(request)
    if observed(request, "Observation"):
        return f"Thought: I have it.\n<code>\nfinal_answer({given['a'] * given['b']})\n</code>"
    return f"Thought: I multiply.\n<code>\nprint(multiply(a={given['a']}, b={given['b']}))\n</code>"


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_an_agent_that_writes_code(stream: bool) -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> str:
        return str(CodeAgent([multiply], model_of(llm), stream_outputs=stream, **QUIET).run(task))

    results = run_agent(agent, coding)
    assert [one.output for one in results] == ["42", "72"]
    assert [len(one.exchanges) for one in results] == [2, 2]
    assert [exchange.request.get("stream", False) for one in results for exchange in one.exchanges] == [stream] * 4
    assert [len(one.record.samples) for one in results] == [1, 1]


def calling(request: Json) -> Json:
    """A model that calls its tool, and then the one that ends the run."""
    given = question(request)
    if observed(request, "Observation"):
        return call("final_answer", 1, answer=str(given["a"] * given["b"]))
    return call("multiply", **given)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_an_agent_that_calls_tools(stream: bool) -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> str:
        return str(ToolCallingAgent([multiply], model_of(llm), stream_outputs=stream, **QUIET).run(task))

    results = run_agent(agent, calling)
    assert [one.output for one in results] == ["42", "72"]
    assert [len(one.exchanges) for one in results] == [2, 2]


def test_several_tool_calls_at_once() -> None:
    def model(request: Json) -> Json:
        given = question(request)
        if observed(request, "Observation"):
            return call("final_answer", 1, answer=str(given["a"] * given["b"]))
        return calls(("multiply", given), ("multiply", {"a": given["b"], "b": given["a"]}))

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> str:
        return str(ToolCallingAgent([multiply], model_of(llm), max_tool_threads=2, **QUIET).run(task))

    assert [one.output for one in run_agent(agent, model)] == ["42", "72"]


def test_a_manager_and_its_agent() -> None:
    def model(request: Json) -> Json:
        if "mathematician" not in offered(request):
            return calling(request)
        if observed(request, "Observation"):
            return call("final_answer", 2, answer="It is done.")
        task = f"What is {question(request)['a']} times {question(request)['b']}?"
        return call("mathematician", 3, task=task)

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> str:
        mathematician = ToolCallingAgent(
            [multiply], model_of(llm), name="mathematician", description="Multiplies.", **QUIET
        )
        return str(ToolCallingAgent([], model_of(llm), managed_agents=[mathematician], **QUIET).run(task))

    for one in run_agent(agent, model):
        assert one.output == "It is done."
        assert len(one.exchanges) >= 4


def test_a_final_answer_in_a_form() -> None:
    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> Any:
        helper = CodeAgent([multiply], model_of(llm), use_structured_outputs_internally=True, **QUIET)
        return {"value": helper.run(task), "reward": 1.0}

    def model(request: Json) -> str:
        assert request["response_format"]["type"] == "json_schema"
        given = question(request)
        return json.dumps({"thought": "I multiply.", "code": f"final_answer(multiply({given['a']}, {given['b']}))"})

    results = run_agent(agent, model, direct=False)
    assert [len(one.exchanges) for one in results] == [1, 1]


@pytest.mark.parametrize("kind", [CodeAgent, ToolCallingAgent], ids=lambda kind: kind.__name__)
def test_agents_side_by_side(kind: Any) -> None:
    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> list[str]:
        def ask(name: str) -> str:
            return str(kind([multiply], model_of(llm), instructions=f"You are {name}.", **QUIET).run(task))

        with ThreadPoolExecutor() as pool:
            loop = asyncio.get_running_loop()
            return await asyncio.gather(*(loop.run_in_executor(pool, ask, name) for name in ("Ada", "Emmy")))

    answer = coding if kind is CodeAgent else calling
    for result, value in zip(run_agent(agent, answer, in_order=False), ("42", "72"), strict=True):
        assert result.output == [value, value]
        assert len(result.exchanges) == 4
