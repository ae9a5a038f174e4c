"""smolagents: agents that write code and agents that call tools, streams, a manager, structured output."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import agentlightning as agl
from tests.frameworks.engine import Json, call, calls, last, numbers, offered, said
from tests.frameworks.harness import TaskResult
from tests.frameworks.suite import Model, Promise, keeps, needs
from tests.frameworks.suite import multiply as product_of

needs("smolagents")

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool
from smolagents.monitoring import LogLevel

QUIET: Json = {"verbosity_level": LogLevel.OFF}
PLAIN_AND_STREAMED = {"plain": False, "streamed": True}
VALUES = ["42", "72"]

multiply = tool(product_of)


def model_of(llm: agl.LLM) -> Any:
    return OpenAIModel(llm.model, api_base=llm.get_base_url(), api_key=llm.api_key or "unused")


def question(request: Json) -> Json:
    """Return the numbers of the task; examples in the system prompt have others."""
    own = [message for message in request["messages"] if message["role"] == "user" and "times" in said(message)]
    return numbers({"messages": own[-1:]})


def observed(request: Json) -> bool:
    return "Observation" in said(last(request))


def coding(request: Json) -> str:
    """A model that writes code twice: a step, and the end."""
    factors = question(request)
    if observed(request):
        return f"Thought: I have it.\n<code>\nfinal_answer({factors['a'] * factors['b']})\n</code>"
    return f"Thought: I multiply.\n<code>\nprint(multiply(a={factors['a']}, b={factors['b']}))\n</code>"


def two_calls(result: TaskResult) -> None:
    assert len(result.exchanges) == 2


@keeps(Promise("code", coding, VALUES, [2]), on=PLAIN_AND_STREAMED)
def test_an_agent_that_writes_code(task: str, llm: agl.LLM, stream: bool) -> str:
    return str(CodeAgent([multiply], model_of(llm), stream_outputs=stream, **QUIET).run(task))


def ending(first: Model) -> Model:
    """A model that does the first thing, and then calls the tool that ends the run."""

    def model(request: Json) -> str | Json:
        factors = question(request)
        return call("final_answer", 1, answer=str(factors["a"] * factors["b"])) if observed(request) else first(factors)

    return model


calling = ending(lambda factors: call("multiply", **factors))
twice = ending(lambda factors: calls(("multiply", factors), ("multiply", {"a": factors["b"], "b": factors["a"]})))


@keeps(
    Promise("tool", calling, VALUES, also=two_calls),
    Promise("several tools", twice, VALUES, also=two_calls),
    on=PLAIN_AND_STREAMED,
)
def test_an_agent_that_calls_tools(task: str, llm: agl.LLM, stream: bool) -> str:
    helper = ToolCallingAgent([multiply], model_of(llm), stream_outputs=stream, max_tool_threads=2, **QUIET)
    return str(helper.run(task))


def managing(request: Json) -> str | Json:
    if "mathematician" not in offered(request):
        return calling(request)
    if observed(request):
        return call("final_answer", 2, answer="It is done.")
    return call("mathematician", 3, task="What is {a} times {b}?".format(**question(request)))


def at_least_four_calls(result: TaskResult) -> None:
    assert len(result.exchanges) >= 4


@keeps(Promise("manager", managing, ["It is done."] * 2, also=at_least_four_calls))
def test_a_manager_and_its_agent(task: str, llm: agl.LLM) -> str:
    own = {"name": "mathematician", "description": "Multiplies."}
    mathematician = ToolCallingAgent([multiply], model_of(llm), **own, **QUIET)
    return str(ToolCallingAgent([], model_of(llm), managed_agents=[mathematician], **QUIET).run(task))


def code_in_form(request: Json) -> str:
    assert request["response_format"]["type"] == "json_schema"
    code = "final_answer(multiply({a}, {b}))".format(**question(request))
    return json.dumps({"thought": "I multiply.", "code": code})


@keeps(Promise("in form", code_in_form, VALUES, [1]), direct=False)
def test_a_final_answer_in_a_form(task: str, llm: agl.LLM) -> str:
    return str(CodeAgent([multiply], model_of(llm), use_structured_outputs_internally=True, **QUIET).run(task))


SIDE_BY_SIDE = Promise("side by side", outputs=[[value] * 2 for value in VALUES], in_order=False)


async def side_by_side(task: str, llm: agl.LLM, kind: Any) -> list[str]:
    def ask(name: str) -> str:
        return str(kind([multiply], model_of(llm), instructions=f"You are {name}.", **QUIET).run(task))

    with ThreadPoolExecutor() as pool:
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*(loop.run_in_executor(pool, ask, name) for name in ("Ada", "Emmy")))


test_coding_agents_side_by_side = keeps(SIDE_BY_SIDE, on={"code": CodeAgent}, model=coding)(side_by_side)
test_calling_agents_side_by_side = keeps(SIDE_BY_SIDE, on={"tools": ToolCallingAgent}, model=calling)(side_by_side)
