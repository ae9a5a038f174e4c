"""The agent, a graph of LangGraph: write a query, run it, check it, and rewrite it until the checker accepts it.

The code contains nothing about training, except the reward and the agent name of each call.
"""

from __future__ import annotations

import functools
import os
from typing import Any, TypedDict

import httpx
from airports import Task, is_right, run_query
from langchain_core.runnables import RunnableConfig
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from opentelemetry import trace

import agentlightning as agl

WRITE = "Write a query for SQLite. Table airports: iata, name, city, country, elevation, lat."
CHECK = "Is the query right for the question? Say right or wrong."
REWRITE = "The query is wrong. Write a better one."
MOST_REWRITES = 2


class State(TypedDict):
    """The state of the graph for one task."""

    task: Task
    query: str
    found: str
    verdict: str
    rewrites: int


def write(state: State, config: RunnableConfig) -> dict[str, Any]:
    query = ask("writer", config, WRITE, state["task"]["question"])
    return {"query": query, "rewrites": 0}


def execute(state: State) -> dict[str, Any]:
    rows = run_query(state["task"]["database"], state["query"])
    return {"found": shown(rows)}


def check(state: State, config: RunnableConfig) -> dict[str, Any]:
    return {"verdict": ask("checker", config, CHECK, so_far(state))}


def rewrite(state: State, config: RunnableConfig) -> dict[str, Any]:
    return {"query": ask("writer", config, REWRITE, so_far(state)), "rewrites": state["rewrites"] + 1}


def after_check(state: State) -> str:
    return "rewrite" if state["verdict"] == "wrong" and state["rewrites"] < MOST_REWRITES else END


def shown(rows: list[tuple[object, ...]] | str) -> str:
    """Return the text about the rows for a model: an error unchanged, else the first value."""
    return rows if isinstance(rows, str) else f"found {rows[0][0]}" if rows else "found nothing"


def so_far(state: State) -> str:
    return f"{state['task']['question']}\n{state['query']}\n{state['found']}"


def ask(agent: str, config: RunnableConfig, instruction: str, text: str) -> str:
    """Make one model call under an agent's name."""
    model: ChatOpenAI = config["configurable"]["model"]
    with trace.get_tracer("sql_agent").start_as_current_span(f"invoke_agent {agent}") as span:
        span.set_attribute("gen_ai.agent.name", agent)
        return model.invoke([("system", instruction), ("user", text)]).text.strip()


@functools.cache
def graph() -> Any:
    builder = StateGraph(State)
    for node in (write, execute, check, rewrite):
        builder.add_node(node.__name__, node)
    builder.add_edge(START, "write")
    builder.add_edge("write", "execute")
    builder.add_edge("rewrite", "execute")
    builder.add_edge("execute", "check")
    builder.add_conditional_edges("check", after_check, ["rewrite", END])
    return builder.compile()


@agl.rollout
def answers(task: Task, llm: agl.LLM) -> float:
    """Answer one question; the reward is 1.0 if the last query returns the same as the right one."""
    model = ChatOpenAI(
        model=llm.model,
        base_url=llm.endpoint,
        api_key=llm.api_key or "unused",
        http_client=_connections(os.getpid())[0],
        http_async_client=_connections(os.getpid())[1],
        **llm.sampling_parameters,
    )
    state = graph().invoke({"task": task}, {"configurable": {"model": model}})
    return float(is_right(task, state["query"]))


@functools.cache
def _connections(process: int) -> tuple[httpx.Client, httpx.AsyncClient]:
    """Return this process's connections, which all models share: creating them takes 50 ms."""
    return httpx.Client(timeout=60), httpx.AsyncClient(timeout=60)
