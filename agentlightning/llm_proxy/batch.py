"""The calls of `LLMProxy.batch_query`, with which an algorithm calls the model for a batch of prompts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import aiohttp

from agentlightning.errors import BadRequestError
from agentlightning.store.base import LightningStore
from agentlightning.types import LLM
from agentlightning.types.core import AttemptError

Json = dict[str, Any]
CONCURRENT_QUERIES = 64
_SHOWN = 500
"""Maximum characters of a server's error text in an exception."""


async def ask_batch(
    store: LightningStore,
    llm_of: Callable[[str, str, str | None], LLM],
    batch: Sequence[Any],
    requests: Sequence[Json],
    model: str | None,
    timeout: float,
) -> list[Json]:
    """Make each call in its own rollout, several concurrently, and return the chat completions in order.

    `llm_of` returns the LLM of a rollout, an attempt and a model; `timeout` is the limit of one call, in seconds.

    Raises:
        RuntimeError, TimeoutError: calls failed, or took too long; reports their number and the first failure.
    """
    free = asyncio.Semaphore(CONCURRENT_QUERIES)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout)) as session:

        async def ask(entry: Any, request: Json) -> Json:
            async with free:
                rollout = await store.start_rollout(entry, metadata={"batch_query": True})
                ids = rollout.rollout_id, rollout.attempt.attempt_id
                try:  # the rollout ends with the answer, whatever it is
                    answer = await _ask(session, llm_of(*ids, model or request.get("model")), request)
                except BaseException as error:
                    cause = AttemptError(type=type(error).__name__, message=str(error), traceback="")
                    fault: Json = {"outcome": "infrastructure_fault", "outcome_reason": "exception", "error": cause}
                    await asyncio.shield(store.update_attempt(*ids, status="failed", **fault))
                    raise
                await store.update_attempt(*ids, status="succeeded", outcome="unscored", outcome_reason="no_reward")
                return answer

        answers = await asyncio.gather(*map(ask, batch, requests), return_exceptions=True)
    failures = [answer for answer in answers if isinstance(answer, BaseException)]
    if failures:
        kind = TimeoutError if all(isinstance(failure, TimeoutError) for failure in failures) else RuntimeError
        first = str(failures[0]) or f"no reply within {timeout:g} seconds"
        raise kind(f"{len(failures)} of {len(answers)} queries failed; the first: {first}") from failures[0]
    return cast("list[Json]", answers)


async def _ask(session: aiohttp.ClientSession, llm: LLM, request: Json) -> Json:
    headers = {"Authorization": f"Bearer {llm.api_key}"} if llm.api_key else {}
    body = {**request, "model": llm.model}
    async with session.post(f"{llm.endpoint}/chat/completions", json=body, headers=headers) as reply:
        text = await reply.text()
        if reply.status != 200:
            raise RuntimeError(f"status {reply.status}: {text[:_SHOWN]}")
    return json.loads(text)


def read_entry(index: int, entry: Any) -> Json:
    """Return the body of the request for an entry.

    Raises:
        BadRequestError: the entry is not a valid request.
    """
    if isinstance(entry, str):
        return {"messages": [{"role": "user", "content": entry}]}
    if isinstance(entry, Mapping) and "messages" in entry:
        request = dict(cast("Mapping[str, Any]", entry))
        if request.get("stream"):
            raise BadRequestError(f"entry {index} of the batch sets 'stream'; remove it (replies are complete)")
        return request
    if isinstance(entry, list) and entry and all(isinstance(message, Mapping) for message in cast("list[Any]", entry)):
        return {"messages": entry}
    raise BadRequestError(
        f"entry {index} of the batch must be a string, a list of messages such as {{'role': 'user', 'content': ...}}, "
        f"or a dict with 'messages'; got {entry!r:.200}. To run the agent on tasks, enqueue rollouts: "
        "store.enqueue_rollout(task)"
    )
