"""The agent: one model call. The reward is 1 if the reply is the answer, ignoring case and a full stop."""

from __future__ import annotations

from typing import Final

import aiohttp

import agentlightning as agl
from bench.pretrained.words import Item

PATIENCE: Final = aiohttp.ClientTimeout(total=1800)
"""Time limit of a call: all calls of a step are sent at once, and a busy machine takes minutes for them."""


@agl.rollout
async def names_kind(task: Item, llm: agl.LLM) -> float:
    """Ask for the kind of the word."""
    body = {"model": llm.model, "messages": task["messages"], **llm.sampling_parameters}
    headers = {"Authorization": f"Bearer {llm.api_key or 'unused'}"}
    async with (
        aiohttp.ClientSession(headers=headers, timeout=PATIENCE) as session,
        session.post(f"{llm.endpoint}/chat/completions", json=body) as response,
    ):
        response.raise_for_status()
        reply = await response.json()
    return float(is_right(reply["choices"][0]["message"]["content"] or "", task["answer"]))


def is_right(reply: str, answer: str) -> bool:
    """Return whether the reply is the answer and nothing else."""
    return reply.strip().removesuffix(".").casefold() == answer
