"""Small parts of the tests of stores: spans of an attempt, a server with its client, a value that must be there."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from agentlightning.store import LightningStore, LightningStoreClient, LightningStoreServer
from agentlightning.store.base import request_token
from agentlightning.types import AttemptedRollout, Span

T = TypeVar("T")


def required(value: T | None) -> T:
    """Return a value that is not None."""
    assert value is not None
    return value


def span_of(owner: AttemptedRollout | tuple[str, str], name: str = "step", number: int = -1, **fields: Any) -> Span:
    """Return a span of an attempt, or of the ids of one; it is numbered by the store unless it has a number."""
    ids = owner if isinstance(owner, tuple) else (owner.rollout_id, owner.attempt.attempt_id)
    values = {"attributes": {"k": "v"}, "name": name, "rollout_id": ids[0], "attempt_id": ids[1], "sequence_id": number}
    return Span.from_attributes(**{**values, **fields})


@contextlib.asynccontextmanager
async def serving(
    store: LightningStore, **settings: Any
) -> AsyncIterator[tuple[LightningStoreServer, LightningStoreClient]]:
    """Serve a store on a free port; give the server and a client that has its token."""
    server = LightningStoreServer(store, port=0, **settings)
    await server.start()
    client = LightningStoreClient(server.endpoint, deadline=5.0, token=settings.get("token"))
    try:
        yield server, client
    finally:
        await client.close()
        await server.stop()


async def until(holds: Callable[[], Awaitable[Any]], seconds: float = 30.0) -> None:
    """Poll until something holds: a timer of the store makes the change, without a notice."""
    end = time.monotonic() + seconds
    while not await holds():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.02)


async def with_token(token: str | None, call: Awaitable[T]) -> T:
    """Await a call that carries a token."""
    before = request_token.set(token)
    try:
        return await call
    finally:
        request_token.reset(before)
