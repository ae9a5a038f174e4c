"""The agent: a prompt written as a conversation, one model call, one token. The reward is 1 for the right language.

A prompt is a text with the placeholder `{text}`. Its lines `User: ...` and `Assistant: ...` are turns of the
conversation, the text before the first of them is the system message, and a prompt without such lines is one message of
the user. The model returns one token with its twenty likeliest ones; the answer is the first of these with which the
name of exactly one language begins. If there is none, the reward is 0.
"""

from __future__ import annotations

import re
from typing import Any, Final

import aiohttp

import agentlightning as agl
from bench.prompts.languages import LANGUAGES, Item

TOP: Final = 20
_TURN: Final = re.compile(r"^(User|Assistant): ?", re.MULTILINE)
_SHORTEST: Final = 2  # characters of a token that names a language


def messages_of(prompt: str) -> list[dict[str, str]]:
    """Return the conversation of a filled prompt."""
    system, *turns = _TURN.split(prompt)
    if not turns:
        return [{"role": "user", "content": prompt}]
    messages = [{"role": "system", "content": system.strip()}] if system.strip() else []
    for role, text in zip(turns[::2], turns[1::2], strict=True):
        messages.append({"role": role.lower(), "content": text.strip()})
    return messages


def answer_of(tokens: list[str]) -> str | None:
    """Return the language of the likeliest token that names one; None if none does."""
    for token in tokens:
        start = token.strip().casefold()
        named = [each for each in LANGUAGES if each.casefold().startswith(start)]
        if len(start) >= _SHORTEST and len(named) == 1:
            return named[0]
    return None


@agl.rollout
async def names_language(task: Item, prompt: agl.PromptTemplate, llm: agl.LLM) -> float:
    """Ask the model once, and return 1.0 if it named the language."""
    messages = messages_of(prompt.format(text=task["text"]))
    body: dict[str, Any] = {"model": llm.model, "messages": messages, "temperature": 0, "max_tokens": 1}
    body |= {"logprobs": True, "top_logprobs": TOP}
    async with (
        aiohttp.ClientSession(raise_for_status=True) as session,
        session.post(f"{llm.get_base_url()}/chat/completions", json=body) as reply,
    ):
        completion: dict[str, Any] = await reply.json()
    likely: list[dict[str, Any]] = completion["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return float(answer_of([each["token"] for each in likely]) == task["language"])
