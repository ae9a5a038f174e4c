"""LangGraph: a graph of one's own with bound tools and structured output, its prebuilt agent, streams, branches."""

from __future__ import annotations

import operator
from typing import Annotated, Any

import pytest
from typing_extensions import TypedDict

import agentlightning as agl
from tests.frameworks import suite
from tests.frameworks.engine import Json, both_ways
from tests.frameworks.suite import (
    PRODUCTS,
    SAID,
    SAID_TWICE,
    Product,
    Promise,
    address,
    in_form,
    keeps,
    multiply,
    needs,
)

needs("langgraph")
needs("langchain_openai", "langchain-openai")

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, create_react_agent, tools_condition


def both_ways_in_form(request: Json) -> str | Json:
    return in_form(request) if request.get("response_format") else both_ways(request)


IN_FORM = Promise("in form", in_form, list(zip(SAID, PRODUCTS, strict=True)), [2, 1])
SEVERAL = IN_FORM.but(
    name="several tools", model=both_ways_in_form, outputs=list(zip(SAID_TWICE, PRODUCTS, strict=True))
)
multiplier = tool(multiply)


def model_of(llm: agl.LLM) -> ChatOpenAI:
    return ChatOpenAI(model=llm.model, **address(llm))


class State(MessagesState):
    product: Product


def graph_of(llm: agl.LLM) -> Any:
    """A graph as users draw it: the model with its tools, until it needs none; then the answer in a form."""
    model = model_of(llm)
    with_tools, in_form = model.bind_tools([multiplier]), model.with_structured_output(Product)

    async def think(state: State) -> Any:
        return {"messages": [await with_tools.ainvoke(state["messages"])]}

    async def conclude(state: State) -> Any:
        return {"product": await in_form.ainvoke(state["messages"])}

    graph = StateGraph(State)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([multiplier]))
    graph.add_node("conclude", conclude)
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition, {"tools": "tools", END: "conclude"})
    graph.add_edge("tools", "think")
    graph.add_edge("conclude", END)
    return graph.compile()


@keeps(IN_FORM, SEVERAL)
async def test_a_graph_with_tools_and_structured_output(task: str, llm: agl.LLM) -> tuple[str, Product]:
    state = await graph_of(llm).ainvoke({"messages": [("user", task)]})
    return state["messages"][-1].text, state["product"]


@keeps(suite.WORDS, model=in_form, rows=[2, 1])
async def test_a_graph_that_streams_its_tokens(task: str, llm: agl.LLM) -> list[str]:
    words: list[str] = []
    nodes: list[str] = []
    stream = graph_of(llm).astream({"messages": [("user", task)]}, stream_mode=["messages", "updates"])
    async for mode, part in stream:
        if mode == "updates":
            nodes.extend(part)
        elif part[1]["langgraph_node"] == "think":
            words.append(part[0].text)
    assert nodes == ["think", "tools", "think", "conclude"]
    return words


@pytest.mark.filterwarnings("ignore:create_react_agent has been moved")  # and is still what most graphs use
@keeps(IN_FORM)
def test_the_prebuilt_agent(task: str, llm: agl.LLM) -> tuple[str, Any]:
    graph = create_react_agent(model_of(llm), [multiplier], prompt="Use the tool.", response_format=Product)
    state = graph.invoke({"messages": [("user", task)]})
    return state["messages"][-1].text, state["structured_response"]


class Opinions(TypedDict):
    question: str
    opinions: Annotated[list[str], operator.add]


@keeps(suite.SIDE_BY_SIDE)
def test_branches_side_by_side(task: str, llm: agl.LLM) -> list[str]:
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
