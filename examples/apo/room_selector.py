"""The rooms, the requests for them, and the agent: one model call with a prompt that states the rules."""

from __future__ import annotations

import itertools
import json
import random
from functools import cache
from typing import Any

import openai

import agentlightning as agl

NEEDS = ("whiteboard", "accessible", "screen", "quiet")
ROOMS: dict[str, tuple[int, set[str]]] = {
    "A101": (4, {"whiteboard", "accessible", "quiet"}),
    "B201": (6, {"accessible", "screen", "quiet"}),
    "B202": (8, {"whiteboard", "screen", "quiet"}),
    "C301": (10, {"whiteboard", "accessible", "screen"}),
    "D401": (12, set(NEEDS)),
}
"""Seats and equipment by room; the smallest room first."""


def smallest(people: int, needs: set[str]) -> str:
    return next(name for name, (seats, has) in ROOMS.items() if seats >= people and needs <= has)


def make_tasks() -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Return requests for training (32), for validation (32), and held out (112)."""
    tasks: list[dict[str, Any]] = []
    for people, *flags in itertools.product(range(2, 13), *[(False, True)] * len(NEEDS)):
        needs = dict(zip(NEEDS, flags, strict=True))
        tasks.append({"people": people, **needs, "room": smallest(people, {n for n, flag in needs.items() if flag})})
    random.Random(0).shuffle(tasks)
    return tasks[:32], tasks[32:64], tasks[64:]


@cache
def client() -> openai.OpenAI:
    return openai.OpenAI(base_url="http://127.0.0.1/", api_key="unused")


@agl.rollout
def selects_room(task: dict[str, Any], llm: agl.LLM, prompt: agl.PromptTemplate) -> float:
    model = client().with_options(base_url=llm.endpoint, api_key=llm.api_key or "unused")
    request = {name: value for name, value in task.items() if name != "room"}
    rooms = {name: {"seats": seats, "has": sorted(has)} for name, (seats, has) in ROOMS.items()}
    messages: list[Any] = [
        {"role": "system", "content": f"{prompt.format(people=task['people'])}\nAnswer with its name alone."},
        {"role": "user", "content": json.dumps({"rooms": rooms, "request": request})},
    ]
    reply = model.chat.completions.create(model=llm.model, messages=messages)
    return float(reply.choices[0].message.content == task["room"])
