"""The agent: an ordinary program that asks a model, runs the tools that the model calls, and checks the answer."""

from __future__ import annotations

from functools import cache
from typing import Any

import openai

import agentlightning as agl
from agentlightning.demo.calculator import TOOLS, run_tool
from agentlightning.demo.tasks import Task


@cache
def client() -> Any:
    """Return the one client for all rollouts of a process: its copies share connections."""
    return openai.OpenAI(base_url="http://127.0.0.1/", api_key="unused")


@agl.rollout
def solves(task: Task, llm: agl.LLM) -> float:
    model = client().with_options(base_url=llm.endpoint, api_key=llm.api_key or "unused")
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    for _ in range(3):
        reply = model.chat.completions.create(
            model=llm.model, messages=messages, tools=TOOLS, **llm.sampling_parameters
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return float(message.content == str(task["answer"]))
        messages.append(message)
        for call in message.tool_calls:
            result = run_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0
