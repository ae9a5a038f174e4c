"""The player: a model that asks and then guesses. What it is told, and what its game is worth, comes from `things`."""

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
    """The thing to be guessed; the model never sees it."""
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
    """One client for all rollouts of a process: its copies share connections."""
    return openai.OpenAI(base_url="http://127.0.0.1/", api_key="unused")


@agl.rollout
def plays(task: Task, llm: agl.LLM) -> float:
    """Play one game; the reward is 0 without the right guess, else between 0.5 and 1, more for fewer turns."""
    model = client().with_options(base_url=llm.endpoint, api_key=llm.api_key or "unused")
    extra: dict[str, Any] = {"tools": TOOLS} if task["search"] else {}
    messages: list[Any] = [{"role": "user", "content": RULES}]
    for turn in range(1, MOST_TURNS + 1):
        reply = model.chat.completions.create(model=llm.model, messages=messages, **extra, **llm.sampling_parameters)
        message = reply.choices[0].message
        messages.append(message)
        if message.tool_calls:
            for call in message.tool_calls:
                found = looked_up(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
            continue
        said = understood(message.content or "")
        if said is not None and said.kind == "guess":
            return reward(found=said.word == task["thing"], turns=turn)
        told = NOT_UNDERSTOOD if said is None else answer(task["thing"], said.word)
        messages.append({"role": "user", "content": told})
    return reward(found=False, turns=MOST_TURNS)


def looked_up(name: str, arguments: str) -> str:
    """Return what the tool finds; nothing for arguments that it does not have."""
    try:
        query = json.loads(arguments)["query"]
    except (ValueError, KeyError, TypeError):
        return NOTHING
    return search(query) if name == "search" and isinstance(query, str) else NOTHING
