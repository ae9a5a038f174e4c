"""The demo's agent: it calls a model, runs the calculator if the model requests it, and checks the answer.

Apart from the returned reward, this module does not depend on training.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import openai

from agentlightning.demo.calculator import TOOLS, run_tool
from agentlightning.demo.settings import MAX_TURNS

if TYPE_CHECKING:
    from agentlightning.demo.tasks import Task
    from agentlightning.types.resources import LLM


def calc_agent(task: Task, llm: LLM) -> float:
    """Answer the question of the task with a calculator. The reward is 1.0 for the right answer."""
    client = _client(os.getpid()).with_options(base_url=llm.endpoint, api_key=llm.api_key or "unused")
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    for _ in range(MAX_TURNS):
        reply = client.chat.completions.create(
            model=llm.model, messages=messages, tools=TOOLS, **llm.sampling_parameters
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return 1.0 if is_right(message.content or "", task["answer"]) else 0.0
        messages.append(message)
        for call in message.tool_calls:
            result = run_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def is_right(reply: str, answer: float | str) -> bool:
    """Return True if the reply is the answer: the same number, or the same text regardless of case."""
    text = reply.strip().rstrip(".")
    try:
        return float(text) == float(answer)
    except ValueError:
        return text.casefold() == str(answer).strip().rstrip(".").casefold()


@functools.cache
def _client(process_id: int) -> Any:
    """Return the client of this process. Its copies share connections and TLS settings, which take 50 ms to create."""
    return openai.OpenAI(base_url="http://127.0.0.1/", api_key="unused")
