"""`store.traces`, the spans of all rollouts, for algorithms that need all of them."""

from __future__ import annotations

from typing import Any, Protocol

from agentlightning.errors import TooLargeError
from agentlightning.store.cursors import pages_of
from agentlightning.types import Attempt, PaginatedResult, Span

MOST_SPANS = 100_000
"""Largest number of spans that are read into memory by default."""
_PAGE = 100


class Readable(Protocol):
    """The operations of a store that are needed to read all its spans."""

    async def query_rollouts(self, *, sort_by: str | None = None, limit: int = -1) -> PaginatedResult[Any]: ...

    async def query_attempts(self, rollout_id: str) -> PaginatedResult[Attempt]: ...

    async def query_spans(self, rollout_id: str, *, limit: int = -1) -> PaginatedResult[Span]: ...


class Traces:
    """The spans of a store, read rollout by rollout. For one rollout, use `store.query_spans`."""

    def __init__(self, store: Readable) -> None:
        self._store = store

    async def get_all(self, *, most: int = MOST_SPANS) -> list[Span]:
        """Return the spans of all rollouts: the oldest rollout first, and the spans of each rollout by number.

        Raises:
            TooLargeError: there are more than `most` spans.
            GoneError: the spans of a rollout were evicted from memory.
        """
        spans: list[Span] = []
        async for page in pages_of(self._store.query_rollouts, sort_by="start_time", limit=_PAGE):
            for rollout in page:
                spans += await self._store.query_spans(rollout.rollout_id, limit=most + 1 - len(spans))
                if len(spans) > most:
                    raise TooLargeError(
                        f"The store has more than {most} spans. Read the spans of one rollout at a time, "
                        "await store.query_spans(rollout_id), or increase the limit: get_all(most=...)"
                    )
        return spans
