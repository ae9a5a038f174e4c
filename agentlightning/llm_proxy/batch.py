"""`LLMProxy.batch_query`: an algorithm asks the model itself, for a whole batch at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp

from agentlightning.errors import BadRequestError
from agentlightning.store.base import LightningStore
from agentlightning.types import LLM
from agentlightning.types.core import AttemptError

CONCURRENT_QUERIES = 64
_SHOWN = 500
"""Characters of a refusal that are told."""


class BatchQueries:
    """The part of `LLMProxy` that is a client of itself; the rest of it is `LLMProxy`."""

    store: LightningStore | None

    def as_resource(
        self, rollout_id: str | None = None, attempt_id: str | None = None, model: str | None = None
    ) -> LLM:
        raise NotImplementedError

    def is_running(self) -> bool:
        raise NotImplementedError

    async def start(self) -> None:
        raise NotImplementedError

    async def stop(self) -> None:
        raise NotImplementedError

    async def batch_query(
        self, batch: Sequence[Any], *, model: str | None = None, timeout: float = 600.0
    ) -> list[dict[str, Any]]:
        """Ask the model for each entry of a batch, up to 64 at once, and return its chat completions in order.

        An entry is a text, a list of messages, or the dict of a request with `messages`. Each is asked in a rollout of
        its own, whose call is recorded like any other and which ends `unscored`. `model` is needed where several are
        served; `timeout` holds for one call, in seconds. A gateway that does not run is started for the time.

        To run the agent on a batch, enqueue rollouts: `get_store().enqueue_rollout(task)`.

        Raises:
            BadRequestError: an entry is none of these; names it. Nothing was asked.
            ValueError: there is no store, or the model is not clear.
            RuntimeError: calls were refused, which is known when all have ended; says how many, and the first refusal.
            TimeoutError: the same, for calls that took too long.
        """
        requests = [_request(index, entry) for index, entry in enumerate(batch)]
        store = self.store
        if store is None:
            raise ValueError("The gateway has no store, where calls are recorded. Give it one: set_store(store)")
        if not timeout > 0:
            raise BadRequestError(f"timeout must be above 0 seconds; got {timeout}")
        free = asyncio.Semaphore(CONCURRENT_QUERIES)
        async with _running(self), aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout)) as session:

            async def ask(entry: Any, request: Mapping[str, Any]) -> dict[str, Any]:
                async with free:
                    return await self._ask(session, store, entry, request, model)

            answers = await asyncio.gather(*map(ask, batch, requests), return_exceptions=True)
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if failures:
            kind = TimeoutError if all(isinstance(failure, TimeoutError) for failure in failures) else RuntimeError
            first = str(failures[0]) or f"no answer within {timeout:g} seconds"
            raise kind(f"{len(failures)} of {len(answers)} queries failed; the first: {first}") from failures[0]
        return cast("list[dict[str, Any]]", answers)

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        store: LightningStore,
        entry: Any,
        request: Mapping[str, Any],
        model: str | None,
    ) -> dict[str, Any]:
        """Ask once, in a rollout that ends with the answer, however it comes."""
        rollout = await store.start_rollout(entry, metadata={"batch_query": True})
        ids = rollout.rollout_id, rollout.attempt.attempt_id
        try:
            llm = self.as_resource(*ids, model or request.get("model"))
            headers = {"Authorization": f"Bearer {llm.api_key}"} if llm.api_key else {}
            body = {**request, "model": llm.model}
            async with session.post(f"{llm.endpoint}/chat/completions", json=body, headers=headers) as reply:
                text = await reply.text()
                if reply.status != 200:
                    raise RuntimeError(f"status {reply.status}: {text[:_SHOWN]}")
            answer = json.loads(text)
        except BaseException as error:  # the rollout ends whatever happens, then the error goes on
            cause = AttemptError(type=type(error).__name__, message=str(error), traceback="")
            fault: dict[str, Any] = {"outcome": "infrastructure_fault", "outcome_reason": "exception", "error": cause}
            await asyncio.shield(store.update_attempt(*ids, status="failed", **fault))
            raise
        await store.update_attempt(*ids, status="succeeded", outcome="unscored", outcome_reason="no_reward")
        return cast("dict[str, Any]", answer)


@asynccontextmanager
async def _running(gateway: BatchQueries) -> AsyncGenerator[None]:
    if gateway.is_running():
        yield
        return
    await gateway.start()
    try:
        yield
    finally:
        await gateway.stop()


def _request(index: int, entry: Any) -> dict[str, Any]:
    """Return the body of the request that an entry stands for.

    Raises:
        BadRequestError: it stands for none.
    """
    if isinstance(entry, str):
        return {"messages": [{"role": "user", "content": entry}]}
    if isinstance(entry, Mapping) and "messages" in entry:
        request = dict(cast("Mapping[str, Any]", entry))
        if request.get("stream"):
            raise BadRequestError(f"entry {index} of the batch asks for a stream; batch_query returns whole replies")
        return request
    if isinstance(entry, list) and entry and all(isinstance(message, Mapping) for message in cast("list[Any]", entry)):
        return {"messages": entry}
    raise BadRequestError(
        f"entry {index} of the batch must be a text, a list of messages such as {{'role': 'user', 'content': ...}}, or "
        f"a dict with 'messages'; got {entry!r:.200}. To run the agent on tasks, enqueue rollouts: "
        "store.enqueue_rollout(task)"
    )
