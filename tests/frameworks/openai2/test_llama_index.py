"""LlamaIndex: agents with tools, a workflow of agents, streams, structured output; over chat and responses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

import agentlightning as agl
from tests.frameworks import suite
from tests.frameworks.engine import Json, call, last, numbers, offered, said, thoughts
from tests.frameworks.harness import TaskResult
from tests.frameworks.suite import Maker, Product, Promise, keeps, multiply, needs

needs("llama_index", "llama-index")

from llama_index.core.agent.workflow import AgentStream, AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.program import LLMTextCompletionProgram
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai import OpenAI
from llama_index.llms.openai_like import OpenAILikeResponses


def over_chat(llm: agl.LLM) -> Any:
    return agl.integrations.llama_index_llm(llm)


def over_responses(llm: agl.LLM, **more: Any) -> Any:
    settings = {"model": llm.model, "api_base": llm.get_base_url(), "api_key": llm.api_key or "unused"}
    return OpenAILikeResponses(**settings, is_chat_model=True, is_function_calling_model=True, **more)


DIALECTS = {"chat": over_chat, "responses": over_responses}


def agent_of(model: Any, **more: Any) -> FunctionAgent:
    return FunctionAgent(llm=model, **{"tools": [multiply], "system_prompt": "Use the tool.", **more})


@keeps(suite.TOOL_LOOP, suite.SEVERAL_TOOLS, suite.THOUGHTS_DROPPED, on=DIALECTS)
async def test_an_agent_with_a_tool(task: str, llm: agl.LLM, model_of: Maker) -> str:
    return str(await agent_of(model_of(llm)).run(task))


@keeps(suite.TOOL_LOOP, on=DIALECTS)
async def test_an_agent_that_does_not_stream(task: str, llm: agl.LLM, model_of: Maker) -> str:
    return str(await agent_of(model_of(llm), streaming=False).run(task))


def remembered(result: TaskResult) -> None:
    assert thoughts(result.exchanges[1].request) == ["Thought."]


def counting(request: Json) -> Json:
    return {"content": f"Answer {len(request['messages'])}.", "reasoning_content": "Thought."}


@keeps(Promise("remembered", counting, [["Answer 1.", "Answer 3."]] * 2, [2], also=remembered), direct=False)
async def test_what_the_server_remembers_keeps_its_thoughts(task: str, llm: agl.LLM) -> list[str]:
    model = over_responses(llm, track_previous_responses=True)
    answers = [await model.achat([ChatMessage(question)]) for question in (task, f"And why? {task}")]
    return [str(answer.message.content) for answer in answers]


@keeps(suite.WORDS)
async def test_the_words_of_an_agent_as_they_come(task: str, llm: agl.LLM) -> list[str]:
    running = agent_of(over_chat(llm)).run(task)
    words = [event.delta async for event in running.stream_events() if isinstance(event, AgentStream)]
    await running
    return words


def reacting(request: Json) -> str:
    """A model whose tool calls are text."""
    if "Observation" in said(last(request)):
        return f"Thought: I can answer.\nAnswer: {said(last(request)).split()[-1]}"
    question = [message for message in request["messages"] if "times" in said(message)][-1]
    factors = numbers({"messages": [{**question, "role": "user"}]})
    return f"Thought: I multiply.\nAction: multiply\nAction Input: {json.dumps(factors)}"


def two_calls(result: TaskResult) -> None:
    assert len(result.exchanges) == 2


@keeps(Promise("react", reacting, ["42", "72"], also=two_calls))
async def test_a_react_agent_whose_tools_are_in_words(task: str, llm: agl.LLM) -> str:
    return str(await ReActAgent(tools=[multiply], llm=over_chat(llm)).run(task))


def handing_over(request: Json) -> str | Json:
    if "multiply" in offered(request):
        results = [said(message).strip() for message in request["messages"] if message["role"] == "tool"]
        return "It is done." if {"42", "72"} & set(results) else call("multiply", 1, **numbers(request))
    return call("handoff", to_agent="mathematician", reason="It is arithmetic.")


@keeps(Promise("handoff", handing_over, ["It is done."] * 2, [1, 2]))
async def test_a_workflow_of_agents_that_hand_over(task: str, llm: agl.LLM) -> str:
    model, expert = over_chat(llm), "mathematician"
    triage = agent_of(model, name="triage", description="Hands over.", tools=[], can_handoff_to=[expert])
    mathematician = agent_of(model, name=expert, description="Multiplies.", can_handoff_to=[])
    return str(await AgentWorkflow(agents=[triage, mathematician], root_agent="triage").run(task))


@keeps(suite.PARSED, on={way: way for way in ("structured_llm", "tool", "text")})
async def test_structured_output(task: str, llm: agl.LLM, way: str) -> Product:
    model = over_chat(llm)
    if way == "structured_llm":
        return (await model.as_structured_llm(Product).achat([ChatMessage(task)])).raw
    if way == "tool":
        form = FunctionTool.from_defaults(fn=lambda **form: form, name="Product", description="p", fn_schema=Product)
        reply = await model.achat_with_tools([form], user_msg=task, tool_required=True)
        (tool_call,) = model.get_tool_calls_from_response(reply)
        return Product(**tool_call.tool_kwargs)
    program = LLMTextCompletionProgram.from_defaults(
        output_cls=Product, prompt_template_str="{task}", llm=model, verbose=False
    )
    return await program.acall(task=task)


def streaming(request: Json) -> str:
    return f"{said(request['messages'][0]).split()[-1]} {'streams' if request.get('stream') else 'agrees'}."


SPOKEN = [["Ada. agrees.", "Emmy. agrees.", "Ada. streams.", "Emmy. streams."]] * 2


@keeps(Promise("side by side", streaming, SPOKEN, [1] * 4, in_order=False))
async def test_calls_side_by_side(task: str, llm: agl.LLM) -> list[str]:
    model = over_chat(llm)
    conversations = [[ChatMessage(f"You are {name}.", role="system"), ChatMessage(task)] for name in ("Ada", "Emmy")]
    plain = await asyncio.gather(*(model.achat(messages) for messages in conversations))

    async def streamed(messages: list[ChatMessage]) -> str:
        return "".join([part.delta or "" async for part in await model.astream_chat(messages)])

    return [str(one.message.content) for one in plain] + list(await asyncio.gather(*map(streamed, conversations)))


def test_the_helper_sends_the_temperature_of_the_run() -> None:
    sampling = {"temperature": 0.7, "top_p": 0.9}
    resource = agl.LLM(endpoint="http://127.0.0.1:1/v1", model="m", sampling_parameters=sampling)
    made = agl.integrations.llama_index_llm(resource, context_window=32_000)
    assert (made.temperature, made.additional_kwargs) == (0.7, {"top_p": 0.9})
    assert (made.metadata.context_window, made.metadata.is_function_calling_model) == (32_000, True)
    untold = agl.LLM(endpoint="http://127.0.0.1:1/v1", model="m")
    assert agl.integrations.llama_index_llm(untold).temperature == 1.0
    with pytest.raises(ValueError, match="uses model of the attempt's llm"):
        agl.integrations.llama_index_llm(untold, model="other")


def test_the_class_for_the_vendor_knows_the_models_of_the_vendor_only() -> None:
    with pytest.raises(ValueError, match="Unknown model 'policy'"):
        _ = OpenAI(model="policy", api_base="http://127.0.0.1:1/v1", api_key="none").metadata
