"""The player: a model that asks and then guesses. The answers and the reward come from `things`."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Final, TypedDict

import openai
from things import MOST_TURNS, NOT_UNDERSTOOD, NOTHING, RULES, answer, reward, search, understood

import agentlightning as agl


class Task(TypedDict):
    """One game."""

    thing: str
    """The thing to guess; the model does not see it."""
    search: bool
    """True if the player has the search tool."""


TOOLS: Final[list[Any]] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Find three things that have some of the properties and not others. It takes a turn.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string", "description": "for example: alive not animal big"}},
                "required": ["query"],
            },
        },
    }
]


@cache
def client() -> Any:
    """Return the one client for all rollouts of a process: its copies share connections."""
    return openai.OpenAI(base_url="http://127.0.0.1/", api_key="unused")


@agl.rollout
def plays(task: Task, llm: agl.LLM) -> float:
    """Run one game; the reward is 0 without the correct guess, else between 0.5 and 1, more for fewer turns."""
    model = client().with_options(base_url=llm.endpoint, api_key=llm.api_key or "unused")
    extra: dict[str, Any] = {"tools": TOOLS} if task["search"] else {}
    messages: list[Any] = [{"role": "user", "content": RULES}]
    for turn in range(1, MOST_TURNS + 1):
        reply = model.chat.completions.create(model=llm.model, messages=messages, **extra, **llm.sampling_parameters)
        message = reply.choices[0].message
        messages.append(message)
        if message.tool_calls:
            for call in message.tool_calls:
                result = looked_up(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            continue
        move = understood(message.content or "")
        if move is not None and move.kind == "guess":
            return reward(found=move.word == task["thing"], turns=turn)
        text = NOT_UNDERSTOOD if move is None else answer(task["thing"], move.word)
        messages.append({"role": "user", "content": text})
    return reward(found=False, turns=MOST_TURNS)


def looked_up(name: str, arguments: str) -> str:
    """Return the result of the tool; `NOTHING` for invalid arguments."""
    try:
        query = json.loads(arguments)["query"]
    except (ValueError, KeyError, TypeError):
        return NOTHING
    return search(query) if name == "search" and isinstance(query, str) else NOTHING
