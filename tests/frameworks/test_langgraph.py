"""LangGraph: a graph of one's own with bound tools and structured output, its prebuilt agent, streams, branches."""

from __future__ import annotations

import json
import operator
from typing import Annotated, Any

import pytest
from pydantic import BaseModel
from typing_extensions import TypedDict

import agentlightning as agl
from tests.frameworks.engine import Json, both_ways, calculator, numbers, said
from tests.frameworks.harness import run_agent

pytest.importorskip("langgraph", reason="langgraph is not installed: make test-frameworks")
pytest.importorskip("langchain_openai", reason="langchain-openai is not installed: make test-frameworks")

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent, tools_condition

SAID = ["It is 42, no doubt.", "It is 72, no doubt."]


class Product(BaseModel):
    """An answer that can be parsed."""

    a: int
    b: int
    value: int


PRODUCTS = [Product(a=6, b=7, value=42), Product(a=8, b=9, value=72)]


@tool
def multiply(a: int, b: int) -> int:
    """Return a times b."""
    return a * b


def model_of(llm: agl.LLM) -> ChatOpenAI:
    return ChatOpenAI(model=llm.model, base_url=llm.get_base_url(), api_key=llm.api_key)


def structured(request: Json) -> str | Json:
    """A model that uses its tool, and at the end answers in the form that it was told."""
    if not request.get("response_format"):
        return calculator(request)
    found = numbers(request)
    return json.dumps({**found, "value": found["a"] * found["b"]})


class State(MessagesState):
    product: Product


def graph_of(llm: agl.LLM) -> Any:
    """A graph as users draw it: the model with its tools, until it needs none; then the answer in a form."""
    model = model_of(llm)
    with_tools, in_form = model.bind_tools([multiply]), model.with_structured_output(Product)

    async def think(state: State) -> Any:
        return {"messages": [await with_tools.ainvoke(state["messages"])]}

    async def conclude(state: State) -> Any:
        return {"product": await in_form.ainvoke(state["messages"])}

    graph = StateGraph(State)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([multiply]))
    graph.add_node("conclude", conclude)
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition, {"tools": "tools", END: "conclude"})
    graph.add_edge("tools", "think")
    graph.add_edge("conclude", END)
    return graph.compile()


@agl.rollout
async def own_graph(task: str, llm: agl.LLM) -> tuple[str, Product]:
    state = await graph_of(llm).ainvoke({"messages": [("user", task)]})
    return state["messages"][-1].text, state["product"]


def test_a_graph_with_tools_and_structured_output() -> None:
    results = run_agent(own_graph, structured)
    assert [one.output for one in results] == list(zip(SAID, PRODUCTS, strict=True))
    assert [len(one.exchanges) for one in results] == [3, 3]
    assert [[len(row.call_ids) for row in one.record.samples] for one in results] == [[2, 1], [2, 1]]


def test_several_tool_calls_at_once_are_one_row() -> None:
    def model(request: Json) -> str | Json:
        return structured(request) if request.get("response_format") else both_ways(request)

    results = run_agent(own_graph, model)
    assert [one.output[0] for one in results] == ["It is 42 and 42.", "It is 72 and 72."]
    assert [[len(row.call_ids) for row in one.record.samples] for one in results] == [[2, 1], [2, 1]]


@agl.rollout
async def streamed_graph(task: str, llm: agl.LLM) -> tuple[list[str], list[str]]:
    words: list[str] = []
    nodes: list[str] = []
    stream = graph_of(llm).astream({"messages": [("user", task)]}, stream_mode=["messages", "updates"])
    async for mode, part in stream:
        if mode == "updates":
            nodes.extend(part)
        elif part[1]["langgraph_node"] == "think":
            words.append(part[0].text)
    return nodes, [word for word in words if word]


def test_a_graph_that_streams_its_tokens() -> None:
    for result, answer in zip(run_agent(streamed_graph, structured), SAID, strict=True):
        nodes, words = result.output
        assert nodes == ["think", "tools", "think", "conclude"]
        assert "".join(words) == answer
        assert len(words) == len(answer.split())


@agl.rollout
def prebuilt(task: str, llm: agl.LLM) -> tuple[str, Any]:
    graph = create_react_agent(model_of(llm), [multiply], prompt="Use the tool.", response_format=Product)
    state = graph.invoke({"messages": [("user", task)]})
    return state["messages"][-1].text, state["structured_response"]


@pytest.mark.filterwarnings("ignore:create_react_agent has been moved")  # and is still what most graphs use
def test_the_prebuilt_agent() -> None:
    results = run_agent(prebuilt, structured)
    assert [one.output for one in results] == list(zip(SAID, PRODUCTS, strict=True))
    assert [len(one.exchanges) for one in results] == [3, 3]


class Opinions(TypedDict):
    question: str
    opinions: Annotated[list[str], operator.add]


@agl.rollout
def branches(task: str, llm: agl.LLM) -> list[str]:
    graph = StateGraph(Opinions)

    def judge(name: str) -> Any:
        def ask(state: Opinions) -> Any:
            prompt = [("system", f"You are {name}."), ("user", state["question"])]
            return {"opinions": [model_of(llm).invoke(prompt).text]}

        return ask

    for name in ("Ada", "Emmy"):
        graph.add_node(name, judge(name))
        graph.add_edge(START, name)
        graph.add_edge(name, END)
    return sorted(graph.compile().invoke({"question": task, "opinions": []})["opinions"])


def test_branches_side_by_side_are_each_a_row() -> None:
    def model(request: Json) -> str:
        return f"{said(request['messages'][0]).split()[-1]} agrees."

    for result in run_agent(branches, model, in_order=False):
        assert result.output == ["Ada. agrees.", "Emmy. agrees."]
        assert len(result.record.samples) == 2
