"""LangChain: chains, bound tools, structured output, streams and batches; its agent; over chat and over responses."""

from __future__ import annotations

from typing import Any

import agentlightning as agl
from tests.frameworks import suite
from tests.frameworks.engine import Json
from tests.frameworks.suite import Product, Promise, address, in_form, keeps, multiply, needs

needs("langchain_openai", "langchain-openai")
agents = needs("langchain.agents", "langchain")

from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

LANGUAGES = ("French", "Greek", "Finnish")
BATCH = Promise("batch", outputs=[[f"Said in {name}." for name in LANGUAGES]] * 2, rows=[1] * 3, in_order=False)
multiplier = tool(multiply)


def model_of(llm: agl.LLM, **settings: Any) -> ChatOpenAI:
    return ChatOpenAI(model=llm.model, **address(llm), **settings)


@keeps(suite.ONE_CALL)
def test_a_chain(task: str, llm: agl.LLM) -> str:
    prompt = ChatPromptTemplate.from_messages([("system", "Guess."), ("human", "{question}")])
    return (prompt | model_of(llm, temperature=0.2) | StrOutputParser()).invoke({"question": task})


@keeps(suite.TOOL_LOOP, on={"chat": {}, "responses": {"use_responses_api": True}})
def test_bound_tools(task: str, llm: agl.LLM, settings: Json) -> str:
    model = model_of(llm, **settings).bind_tools([multiplier])
    messages: list[Any] = [HumanMessage(task)]
    while True:
        message = model.invoke(messages)
        messages.append(message)
        if not message.tool_calls:
            return message.text
        messages += [multiplier.invoke(call) for call in message.tool_calls]


@keeps(suite.WORDS)
async def test_streams(task: str, llm: agl.LLM) -> Json:
    model = model_of(llm, stream_usage=True).bind_tools([multiplier])
    messages: list[Any] = [HumanMessage(task)]
    first: Any = None
    async for chunk in model.astream(messages):
        first = chunk if first is None else first + chunk
    assert isinstance(first, AIMessageChunk)
    results = [ToolMessage(str(multiplier.invoke(c["args"])), tool_call_id=c["id"]) for c in first.tool_calls]
    chunks = [chunk async for chunk in model.astream([*messages, first, *results])]
    used = [chunk.usage_metadata["total_tokens"] for chunk in (first, *chunks) if chunk.usage_metadata]
    return {"words": [chunk.text for chunk in chunks], "used": sum(used)}


@keeps(suite.PARSED, on={"json_schema": "json_schema", "function_calling": "function_calling"})
def test_structured_output(task: str, llm: agl.LLM, method: str) -> Any:
    return model_of(llm).with_structured_output(Product, method=method).invoke(task)


@keeps(BATCH, model=lambda request: f"Said in {request['messages'][-1]['content'].rsplit(' ', 1)[1]}")
def test_a_batch(task: str, llm: agl.LLM) -> list[str]:
    answers = model_of(llm).batch([f"{task} Answer in {language}." for language in LANGUAGES])
    return [answer.text for answer in answers]


@keeps(suite.TOOL_LOOP)
async def test_its_agent(task: str, llm: agl.LLM) -> str:
    graph = agents.create_agent(model_of(llm), tools=[multiplier], system_prompt="Use the tool.")
    state = await graph.ainvoke({"messages": [HumanMessage(task)]})
    return state["messages"][-1].text


@keeps(suite.PARSED, model=in_form, rows=[2])
def test_its_agent_answers_in_a_form_after_using_a_tool(task: str, llm: agl.LLM) -> Any:
    graph = agents.create_agent(model_of(llm), tools=[multiplier], response_format=Product)
    return graph.invoke({"messages": [HumanMessage(task)]})["structured_response"]
