"""DetailOperations: the part of the contract that tells of single things, as a page wants them; `LightningStore` has it
all.
What is here works over any store that answers the contract's other questions. Stores of this package read less for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, cast

from agentlightning.store.run_operations import SortOrder
from agentlightning.types import PaginatedResult, ResourcesUpdate, Span, SpanOutline, TokenText

if TYPE_CHECKING:
    from agentlightning.store.read_operations import ReadOperations
    from agentlightning.store.run_operations import RunOperations


recording: set[asyncio.Task[None]] = set()
"""Metrics on their way to the store."""


class DetailOperations:
    """Outlines of spans, one span, the versions of a set of resources, tokens as texts, metrics of programs."""

    def record_metric(self, name: str, value: float, tags: Mapping[str, str] | None = None) -> asyncio.Task[None]:
        """Begin `observe_metric` from code that cannot await it, on the running loop; return its task.

        Raises:
            RuntimeError: no event loop runs here.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError(
                "record_metric needs a running event loop; elsewhere: asyncio.run(store.observe_metric(...))"
            ) from None
        task = loop.create_task(self.observe_metric(name, value, tags))
        recording.add(task)
        task.add_done_callback(recording.discard)
        return task

    async def observe_metric(self, name: str, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Add a value to a histogram of the program's own, which the store's page of metrics shows (`/v1/prometheus`).

        A name has the same tags each time. A repeated call counts again.

        Raises:
            BadRequestError: the name or a tag is no name, other tags than before, or too many of either.
        """
        from agentlightning.store.details.metrics import observe

        observe(name, value, tags)

    async def query_span_outlines(
        self,
        rollout_id: str,
        attempt_id: str | Literal["latest"] | None = None,
        *,
        limit: int = 5000,
        offset: int = 0,
    ) -> PaginatedResult[SpanOutline]:
        """Return spans of a rollout, or of one attempt, without their attributes, by number.

        `limit` is from 1 to 20,000.

        Raises:
            BadRequestError: `limit` or `offset` is out of its range.
            GoneError: the spans of this rollout were evicted from memory.
        """
        from agentlightning.store.details.outlines import check_outline_page, outline_of_span

        check_outline_page(limit, offset)
        page = await cast("ReadOperations", self).query_spans(rollout_id, attempt_id, limit=limit, offset=offset)
        items = [outline_of_span(span) for span in page]
        return PaginatedResult(items=items, limit=limit, offset=offset, total=page.total)

    async def get_span(self, rollout_id: str, attempt_id: str, span_id: str) -> Span | None:
        """Return one span; None if unknown. Of several with one id, from different traces, the one of least number.

        Raises:
            GoneError: the spans of this rollout were evicted from memory.
        """
        page = await cast("ReadOperations", self).query_spans(rollout_id, attempt_id)
        return next((span for span in page if span.span_id == span_id), None)

    async def query_resource_versions(
        self, resources_id: str, *, sort_order: SortOrder = "desc", limit: int = 100, offset: int = 0
    ) -> PaginatedResult[ResourcesUpdate]:
        """Return the versions of a set of resources, the newest first; API keys are null. None for an unknown one.

        `limit` is from 1 to 1000.

        Raises:
            BadRequestError: an argument is out of its range.
        """
        from agentlightning.store.details.versions import page_of_versions, without_keys

        store = cast("ReadOperations", self)
        newest = await store.get_resources_by_id(resources_id)
        total = 0 if newest is None else newest.version
        items: list[ResourcesUpdate] = []
        for number in page_of_versions(total, sort_order, limit, offset):
            update = newest if number == total else await store.get_resources_by_id(resources_id, version=number)
            if update is not None:
                items.append(without_keys(update))
        return PaginatedResult(items=items, limit=limit, offset=offset, total=total)

    async def get_token_texts(self, vocabulary_id: str, token_ids: Sequence[int]) -> list[TokenText] | None:
        """Return the text of each token id by a vocabulary of `add_vocabulary`; None if there is no such vocabulary.

        Raises:
            BadRequestError: there are more than 200,000 ids.
        """
        from agentlightning.store.details.token_texts import check_token_ids, texts_of

        check_token_ids(token_ids)
        tokens = await cast("RunOperations", self).get_vocabulary(vocabulary_id)
        return None if tokens is None else texts_of(tokens, token_ids)
