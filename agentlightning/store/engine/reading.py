"""ReadingEngine, the read-only operations on every backend: queries for rollouts, attempts, spans, resources and
workers, summaries and statistics, and waits for changes. They return copies."""

# pyright: reportMissingParameterType=false
# The types of an operation's parameters stand in the contract, store/base.py, from where a checker takes them over.

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar, cast

from pydantic import BaseModel
from typing_extensions import override

from agentlightning.errors import BadRequestError
from agentlightning.semconv import CONTROL_PREFIX
from agentlightning.store.base import UNSET, LightningStore, Unset
from agentlightning.store.cursors import check_not_both, cursor_behind, place_of
from agentlightning.store.details import (
    check_outline_page,
    outline_of_json,
    outline_of_span,
)
from agentlightning.store.engine.runtime import StoreRuntime
from agentlightning.store.engine.waiters import ANY_CHANGE, Key
from agentlightning.store.operations import refuse_broken_texts
from agentlightning.store.rules.events import ended_rollouts, events
from agentlightning.store.rules.query import (
    Plan,
    check_choices,
    check_page,
    combine,
    has_texts,
    page_of,
    text_filter,
)
from agentlightning.store.rules.resources import latest_resources, resources_by_id
from agentlightning.store.rules.spans import decode_all, read_page, read_spans
from agentlightning.store.rules.tx import ResourcesRow, SpanBody, Tx, WorkerRow
from agentlightning.store.rules.values import (
    build,
    check_timeout,
    public_attempt,
    public_attempted,
    public_rollout,
    public_worker,
)
from agentlightning.store.summaries.aggregate import AggregatePlan
from agentlightning.store.summaries.plan import SummaryPlan
from agentlightning.types import (
    LLM,
    Attempt,
    AttemptedRollout,
    EventPage,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    RolloutAggregate,
    Span,
    SpanOutline,
    SummaryPage,
    Worker,
)
from agentlightning.types.core import AnyWorkerStatus
from agentlightning.types.query import AnyPage

M = TypeVar("M", bound=BaseModel)
_MANY = 100
"""A wait for more rollouts than this is kept after a timeout, for the next request of the same wait."""
_NO_FILTERS = (None,) * 7
_OF_PAGE = set(AnyPage.model_fields)


@refuse_broken_texts
class ReadingEngine(LightningStore):
    """The read-only operations of a store over a backend."""

    _runtime: StoreRuntime

    @override
    async def query_rollouts(
        self, *, status_in=None, rollout_id_in=None, rollout_id_contains=None, filter_logic="and",
        sort_by=None, sort_order="asc", limit=-1, offset=0, status=None, rollout_ids=None, run_id=UNSET, cursor=None,
    ) -> PaginatedResult[AttemptedRollout | Rollout]:  # fmt: skip
        _warn_old_name("status", status, "status_in")
        _warn_old_name("rollout_ids", rollout_ids, "rollout_id_in")
        combine([], filter_logic)
        check_not_both(cursor, offset)
        descending, after, total = is_descending(sort_order), None, None
        if cursor is not None:
            check_page(Rollout, sort_by, limit, offset)
            after, (total,) = place_of(cursor, sort_by, sort_order, texts=has_texts(Rollout, sort_by), more=1)
        plan = Plan(
            status_in=status_in if status_in is not None else status,
            ids=rollout_id_in if rollout_id_in is not None else rollout_ids,
            id_contains=rollout_id_contains,
            any_of=filter_logic == "or",
            run_id=None if isinstance(run_id, Unset) else (run_id,),
            sort_by=sort_by,
            descending=descending,
            limit=limit,
            offset=offset,
            after=after,
            total=total,
        )
        await self._runtime.settle()
        records, total, last = await self._runtime.read(lambda tx: tx.find(plan))
        items = [_public(record.rollout, record.latest) for record in records]
        return result_of(items, limit, offset, total, last and cursor_behind(sort_by, descending, last, total))

    @override
    async def query_attempts(
        self, rollout_id, *, sort_by="sequence_id", sort_order="asc", limit=-1, offset=0
    ) -> PaginatedResult[Attempt]:
        sort_by = check_page(Attempt, sort_by, limit, offset)
        await self._runtime.settle()
        record = await self._runtime.read(lambda tx: tx.load(rollout_id))
        attempts = [public_attempt(attempt) for attempt in record.attempts] if record else []
        return _page(attempts, sort_by, sort_order, limit, offset)

    @override
    async def query_spans(
        self, rollout_id, attempt_id=None, *,
        trace_id=None, trace_id_contains=None, span_id=None, span_id_contains=None,
        parent_id=None, parent_id_contains=None, name=None, name_contains=None, filter_logic="and",
        limit=-1, offset=0, sort_by="sequence_id", sort_order="asc",
    ) -> PaginatedResult[Span]:  # fmt: skip
        sort_by = check_page(Span, sort_by, limit, offset)
        combine([], filter_logic)

        def keep(span: Span) -> bool:
            results = text_filter(trace_id, trace_id_contains, span.trace_id)
            results += text_filter(span_id, span_id_contains, span.span_id)
            results += text_filter(parent_id, parent_id_contains, span.parent_id)
            results += text_filter(name, name_contains, span.name)
            return combine(results, filter_logic)

        only = span_id if filter_logic == "and" else None
        filters = (trace_id, trace_id_contains, span_id_contains, parent_id, parent_id_contains, name, name_contains)
        if sort_by == "sequence_id" and span_id == only and filters == _NO_FILTERS:
            page = (only, is_descending(sort_order), limit, offset)
            stored, total = await self._runtime.read(lambda tx: read_page(tx, rollout_id, attempt_id, *page))
            return result_of(decode_all(stored, rollout_id), limit, offset, total)
        bodies = await self._runtime.read(lambda tx: read_spans(tx, rollout_id, attempt_id, only))
        spans = [span for span in decode_all(bodies, rollout_id) if keep(span)]
        return _page(spans, sort_by, sort_order, limit, offset)

    @override
    async def query_resources(
        self, *, resources_id=None, resources_id_contains=None, sort_by=None, sort_order="asc", limit=-1, offset=0
    ) -> PaginatedResult[ResourcesUpdate]:
        sort_by = check_page(ResourcesUpdate, sort_by, limit, offset)
        rows = await self._runtime.read(lambda tx: tx.scan("resources"))
        updates = [
            cast("ResourcesRow", row).update.model_copy(deep=True)
            for key, row in rows
            if combine(text_filter(resources_id, resources_id_contains, key), "and")
        ]
        for resource in (resource for update in updates for resource in update.resources.values()):
            if isinstance(resource, LLM):
                resource.api_key = None
        return _page(updates, sort_by, sort_order, limit, offset)

    @override
    async def query_workers(
        self, *, status_in=None, worker_id_contains=None, filter_logic="and",
        sort_by=None, sort_order="asc", limit=-1, offset=0,
    ) -> PaginatedResult[Worker]:  # fmt: skip
        sort_by = check_page(Worker, sort_by, limit, offset)
        status_in = check_choices("status_in", status_in, AnyWorkerStatus)
        combine([], filter_logic)
        await self._runtime.settle()
        notes = worker_id_contains is not None and worker_id_contains.startswith(CONTROL_PREFIX)

        def keep(worker: Worker) -> bool:
            if worker.worker_id.startswith(CONTROL_PREFIX) != notes:
                return False
            results = text_filter(None, worker_id_contains, worker.worker_id)
            if status_in is not None:
                results.append(worker.status in status_in)
            return combine(results, filter_logic)

        rows = await self._runtime.read(lambda tx: tx.scan("worker"))
        workers = [public_worker(cast("WorkerRow", row).worker) for _, row in rows]
        return _page([worker for worker in workers if keep(worker)], sort_by, sort_order, limit, offset)

    @override
    async def get_rollout_by_id(self, rollout_id) -> AttemptedRollout | Rollout | None:
        await self._runtime.settle()
        record = await self._runtime.read(lambda tx: tx.load(rollout_id))
        return None if record is None else _public(record.rollout, record.latest)

    @override
    async def get_latest_attempt(self, rollout_id) -> Attempt | None:
        await self._runtime.settle()
        record = await self._runtime.read(lambda tx: tx.load(rollout_id))
        return public_attempt(record.latest) if record and record.latest else None

    @override
    async def get_worker_by_id(self, worker_id) -> Worker | None:
        row = await self._runtime.read(lambda tx: tx.get("worker", worker_id))
        return public_worker(cast("WorkerRow", row).worker) if row else None

    @override
    async def get_resources_by_id(self, resources_id, version=None) -> ResourcesUpdate | None:
        update = await self._runtime.read(lambda tx: resources_by_id(tx, resources_id, version))
        return update.model_copy(deep=True) if update else None

    @override
    async def get_latest_resources(self, *, run_id=None) -> ResourcesUpdate | None:
        update = await self._runtime.read(lambda tx: latest_resources(tx, run_id))
        return update.model_copy(deep=True) if update else None

    # --- waiting ----------------------------------------------------------------------------------------------------

    @override
    async def wait_for_rollouts(self, *, rollout_ids, timeout=None) -> list[Rollout]:
        check_timeout(timeout)
        keys: list[Key] = [("end", rollout_id) for rollout_id in rollout_ids]
        finished, _ = await self._runtime.until(
            lambda _: partial(ended_rollouts, rollout_ids=rollout_ids),
            lambda result: [("end", rollout_id) for rollout_id in result[1]],
            keys,
            timeout,
            again=("end", tuple(rollout_ids)) if len(keys) > _MANY else None,
        )
        return [public_rollout(rollout) for rollout in finished]

    @override
    async def query_events(self, *, after=None, limit=100, timeout=0.0, run_id=UNSET) -> EventPage:
        if not 1 <= limit <= 1000:
            raise BadRequestError(f"limit must be from 1 to 1000; got {limit}")
        check_timeout(timeout)
        run = None if isinstance(run_id, Unset) else (run_id,)

        def look_after(last: EventPage | None) -> Callable[[Tx], EventPage]:
            return partial(events, after=after if last is None else last.cursor, limit=limit, run_id=run)

        def missing(page: EventPage) -> list[Key]:
            return [] if page.events or page.runs else [ANY_CHANGE]

        return await self._runtime.until(look_after, missing, [ANY_CHANGE], timeout)

    # --- many rollouts in short -------------------------------------------------------------------------------------

    @override
    async def query_rollout_summaries(
        self, *, filter=None, sort_by="start_time", sort_order="desc", limit=100, offset=0, cursor=None
    ) -> SummaryPage:
        plan = SummaryPlan.of(filter, sort_by, sort_order, limit, offset, cursor)
        await self._runtime.settle()
        return await self._runtime.read(lambda tx: tx.find_summaries(plan))

    @override
    async def aggregate_rollouts(self, *, by="step", filter=None, buckets=0, dimension=None) -> RolloutAggregate:
        plan = AggregatePlan.of(by, filter, buckets, dimension)
        await self._runtime.settle()
        return await self._runtime.read(lambda tx: tx.aggregate(plan))

    # --- single things ----------------------------------------------------------------------------------------------

    @override
    async def query_span_outlines(
        self, rollout_id, attempt_id=None, *, limit=5000, offset=0
    ) -> PaginatedResult[SpanOutline]:
        check_outline_page(limit, offset)
        bodies, total = await self._runtime.read(
            lambda tx: read_page(tx, rollout_id, attempt_id, None, False, limit, offset)
        )
        items = [_outline_of(body, rollout_id) for body in bodies]
        return result_of(items, limit, offset, total)

    @override
    async def get_span(self, rollout_id, attempt_id, span_id) -> Span | None:
        bodies = await self._runtime.read(lambda tx: read_spans(tx, rollout_id, attempt_id, span_id))
        return decode_all(bodies, rollout_id)[0] if bodies else None


def _outline_of(body: SpanBody, rollout_id: str) -> SpanOutline:
    if not isinstance(body, bytes | str):
        return outline_of_span(body.read())
    try:
        return outline_of_json(body)
    except (ValueError, LookupError, TypeError, AttributeError):  # not the JSON of a span: says which
        return outline_of_span(decode_all([body], rollout_id)[0])


def _public(rollout: Rollout, latest: Attempt | None) -> AttemptedRollout | Rollout:
    return public_rollout(rollout) if latest is None else public_attempted(rollout, latest)


def _page(items: list[M], sort_by: str | None, sort_order: str, limit: int, offset: int) -> PaginatedResult[M]:
    page, total = page_of(items, sort_by, is_descending(sort_order), limit, offset)
    return result_of(page, limit, offset, total)


def result_of(items: Sequence[M], limit: int, offset: int, total: int, cursor: str | None = None) -> PaginatedResult[M]:
    fields: dict[str, object] = {"items": items, "limit": limit, "offset": offset, "total": total, "cursor": cursor}
    return build(AnyPage, fields, _OF_PAGE)


def is_descending(order: str) -> bool:
    if order not in ("asc", "desc"):
        raise BadRequestError(f"Unsupported sort order {order!r}; expected 'asc' or 'desc'")
    return order == "desc"


def _warn_old_name(old: str, value: object, new: str) -> None:
    if value is not None:
        import warnings

        warnings.warn(f"{old} is deprecated; use {new} instead", DeprecationWarning, stacklevel=3)
