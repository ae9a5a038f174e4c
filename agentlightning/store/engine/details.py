"""The operations that tell of single things, on every backend: arguments checked, one script each."""

# pyright: reportMissingParameterType=false
# The types of an operation's parameters stand in the contract, store/detail_operations.py.

from __future__ import annotations

from typing import cast

from typing_extensions import override

from agentlightning.store.detail_operations import DetailOperations
from agentlightning.store.details.metrics import observe
from agentlightning.store.details.outlines import check_outline_page, outline_of_json, outline_of_span
from agentlightning.store.details.token_texts import check_token_ids, texts_of
from agentlightning.store.details.versions import page_of_versions, without_keys
from agentlightning.store.engine.runtime import StoreRuntime
from agentlightning.store.rules.resources import resources_by_id
from agentlightning.store.rules.spans import decode_all, read_page, read_spans
from agentlightning.store.rules.tx import SpanBody, Tx, VocabularyRow
from agentlightning.store.wrappers.text_check import refuse_broken_texts
from agentlightning.types import PaginatedResult, ResourcesUpdate, Span, SpanOutline, TokenText


@refuse_broken_texts
class DetailEngine(DetailOperations):
    """The part of a store over a backend that tells of single things."""

    _runtime: StoreRuntime

    @override
    async def query_span_outlines(
        self, rollout_id, attempt_id=None, *, limit=5000, offset=0
    ) -> PaginatedResult[SpanOutline]:
        check_outline_page(limit, offset)
        bodies, total = await self._runtime.read(
            lambda tx: read_page(tx, rollout_id, attempt_id, None, False, limit, offset)
        )
        items = [_outline_of(body, rollout_id) for body in bodies]
        return PaginatedResult(items=items, limit=limit, offset=offset, total=total)

    @override
    async def get_span(self, rollout_id, attempt_id, span_id) -> Span | None:
        bodies = await self._runtime.read(lambda tx: read_spans(tx, rollout_id, attempt_id, span_id))
        return decode_all(bodies, rollout_id)[0] if bodies else None

    @override
    async def query_resource_versions(
        self, resources_id, *, sort_order="desc", limit=100, offset=0
    ) -> PaginatedResult[ResourcesUpdate]:
        page_of_versions(0, sort_order, limit, offset)  # checks

        def script(tx: Tx) -> tuple[list[ResourcesUpdate], int]:
            newest = resources_by_id(tx, resources_id, None)
            total = 0 if newest is None else newest.version
            numbers = page_of_versions(total, sort_order, limit, offset)
            found = [resources_by_id(tx, resources_id, number) for number in numbers]
            return [update for update in found if update is not None], total

        updates, total = await self._runtime.read(script)
        items = [without_keys(update) for update in updates]
        return PaginatedResult(items=items, limit=limit, offset=offset, total=total)

    @override
    async def get_token_texts(self, vocabulary_id, token_ids) -> list[TokenText] | None:
        check_token_ids(token_ids)
        row = await self._runtime.read(lambda tx: tx.get("vocabulary", vocabulary_id))
        return None if row is None else texts_of(cast("VocabularyRow", row).tokens, token_ids)

    @override
    async def observe_metric(self, name, value, tags=None) -> None:
        observe(name, value, tags)


def _outline_of(body: SpanBody, rollout_id: str) -> SpanOutline:
    if not isinstance(body, bytes | str):
        return outline_of_span(body.read())
    try:
        return outline_of_json(body)
    except (ValueError, LookupError, TypeError, AttributeError):  # not the JSON of a span: says which
        return outline_of_span(decode_all([body], rollout_id)[0])
