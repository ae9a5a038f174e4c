"""Wrappers of stores: the complete contract over your own store that implements a part of it, and one run of a store.

A store for an earlier version of the contract has no `timeout`, no `run_id`, no outcomes, and maybe no batches. A
subclass of a store of this package may override one form of an operation, for one object or for many; then this form is
used for both. Server, threads, runs and runners call the complete contract, so `complete` wraps such a store.
"""

# pyright: reportMissingParameterType=false
# The types of an operation's parameters stand in the contract, store/base.py, from where a checker takes them over.

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import logging
import re
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from functools import lru_cache
from typing import Any, cast

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from pydantic import BaseModel
from typing_extensions import override

from agentlightning import types
from agentlightning.errors import BadRequestError
from agentlightning.store.base import (
    UNSET,
    LightningStore,
    LightningStoreCapabilities,
    RequestToken,
    Unset,
    keeps_no_runs,
    request_token,
)
from agentlightning.store.operations import OPERATIONS, forward_operations, names_of
from agentlightning.store.rules.query import check_page, page_of
from agentlightning.store.rules.values import valid
from agentlightning.store.summaries.plan import filter_of
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    AttemptError,
    EnqueueRolloutRequest,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    RolloutFilter,
    Run,
    Span,
    Worker,
)
from agentlightning.types.query import AnyPage
from agentlightning.utils.backoff import backoff_delays

logger = logging.getLogger(__name__)

SHORTEST_PAUSE, LONGEST_PAUSE = 0.01, 1.0
"""Seconds between two claims from a store that cannot wait for rollouts itself."""

_OUTCOME_KEY = "agentlightning.outcome"
"""Metadata key of an attempt for outcome, reason and error, if the store has no fields for them."""
_ENDING = frozenset(("outcome", "outcome_reason", "error"))
_PAGE = ("sort_by", "sort_order", "limit", "offset")
_LISTED: dict[str, type[BaseModel]] = {
    "query_rollouts": Rollout,
    "query_attempts": Attempt,
    "query_spans": Span,
    "query_resources": ResourcesUpdate,
    "query_workers": Worker,
    "query_runs": Run,
}
_FORMS = {name: each.many for name, each in OPERATIONS.items() if each.many is not None}
"""Operations for one object, and their bulk forms."""
_ALL, _OF_RUNS, _DEFAULTED = names_of(), names_of("run"), names_of("default")


class StoreWrapper(LightningStore):
    """A wrapper of another store that changes its operations."""

    def __init__(self, store: LightningStore) -> None:
        self.store = store

    @property
    @override
    def capabilities(self) -> LightningStoreCapabilities:
        return self.store.capabilities

    @override
    def otlp_traces_endpoint(self) -> str:
        return self.store.otlp_traces_endpoint()

    @override
    async def close(self) -> None:
        """Close the wrapped store."""
        await self.store.close()


def complete(store: LightningStore, *, one_at_a_time: bool = False) -> LightningStore:
    """Return a store with the complete contract unchanged, and any other store in a `CompletedStore`.

    An object of a class without operations, such as a mock, is returned unchanged.
    """
    accepted = {name: _accepted(store, name) for name in _ALL}
    if not any(accepted.values()) and not isinstance(store, LightningStore):
        return store
    without_runs = isinstance(store, LightningStore) and not any(accepted[name] for name in _OF_RUNS)
    left_out = {*(_OF_RUNS if without_runs else ()), *(_DEFAULTED if isinstance(store, LightningStore) else ())}
    needed = [name for name in _ALL if accepted[name] or name not in left_out]
    has_all = all(accepted[name].issuperset(OPERATIONS[name].parameters) for name in needed)
    own_lists = any(accepted[name] and not _is_ours(store, name) for name in _LISTED)  # which may be plain lists
    used_as_is = has_all and not own_lists and not any(_preferred(store).values())
    return store if used_as_is else CompletedStore(store, one_at_a_time=one_at_a_time)


def _arguments_of(request: EnqueueRolloutRequest) -> dict[str, Any]:
    """Return a request as arguments of `enqueue_rollout`."""
    return {name: getattr(request, name) for name in OPERATIONS["enqueue_rollout"].parameters}


@contextlib.contextmanager
def _several_calls() -> Generator[None]:
    """Give each call of the store within the block a separate token, if the call in progress has one."""
    token = request_token.get()
    outer = request_token.set(RequestToken(token) if type(token) is str else token)
    try:
        yield
    finally:
        request_token.reset(outer)


def _is_ours(store: LightningStore, operation: str) -> bool:
    return getattr(type(store), operation).__module__.startswith("agentlightning.")


def _accepted(store: LightningStore, operation: str) -> frozenset[str]:
    """Return the names of the arguments that a store's operation accepts; none if the operation is missing."""
    method = getattr(type(store), operation, None)
    if method is None or method is getattr(LightningStore, operation):
        return frozenset()
    own, takes_any = _parameters(method)
    return own.union(OPERATIONS[operation].parameters) if takes_any else own


@lru_cache(maxsize=1024)
def _parameters(method: Callable[..., object]) -> tuple[frozenset[str], bool]:
    """Return the names of a method's parameters, and whether it accepts any keyword. Cached: each trace calls this."""
    parameters = inspect.signature(method).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return frozenset(parameters), takes_any


def _preferred(store: LightningStore) -> dict[str, str | None]:
    """Return for each form of an operation the other form, if it is called instead because a class closer to the
    store's class overrides it; None if the form itself is called."""
    own = itertools.takewhile(lambda cls: cls is not LightningStore, type(store).__mro__)
    here = getattr(store, "__dict__", {})
    counted = here.keys() >= set(_ALL)  # each is an attribute of the store itself, set by a tracker
    homes = [{} if counted else here, *map(vars, own)]
    contract = len(homes)

    def depth(name: str) -> int:
        return next((i for i, home in enumerate(homes) if name in home), contract)

    preferred: dict[str, str | None] = {}
    for one, many in _FORMS.items():
        preferred[one] = many if depth(many) < depth(one) else None
        preferred[many] = one if depth(one) < depth(many) else None
    if depth("add_otel_span") < depth("add_many_spans") < contract and depth("add_otel_span") <= depth("add_span"):
        preferred["add_span"] = preferred["add_many_spans"] = "add_otel_span"
    return preferred


@forward_operations
class CompletedStore(StoreWrapper):
    """The complete contract over a store that implements a part of it.

    A claim that waits is repeated after growing pauses. A batch becomes several calls. Spans are numbered and lists are
    sorted and paged here. The outcome of an attempt is stored in its metadata. Runs are not separated (logged once).
    Other missing parts raise an error: `NotImplementedError` for an operation, `BadRequestError` for an argument. With
    `one_at_a_time`, calls of the store never overlap, except calls that wait.
    """

    def __init__(self, store: LightningStore, *, one_at_a_time: bool = False) -> None:
        super().__init__(store)
        self._accepts = {name: _accepted(store, name) for name in _ALL}
        self._preferred = _preferred(store)
        self._turn = asyncio.Lock() if one_at_a_time else None
        self._warned_of_runs = False
        self._numbers: dict[str, int] = {}
        """The last span number of each rollout, for a store that does not number spans."""

    async def _call(self, operation: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if operation in _DEFAULTED and not self._has(operation):
            return await getattr(LightningStore, operation)(self, *args, **kwargs)
        if operation in _LISTED:
            return _with_outcomes(await self._list(operation, args, kwargs))
        if operation in ("enqueue_rollout", "update_attempt"):
            arguments = OPERATIONS[operation].signature.bind(None, *args, **kwargs).arguments
            del arguments["self"]
            own = self._enqueue if operation == "enqueue_rollout" else self._update_attempt
            return _with_outcomes(await own(arguments))
        return _with_outcomes(await self._call_store(operation, *args, **kwargs))

    async def _list(self, operation: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        paging: dict[str, Any] = {name: kwargs[name] for name in _PAGE if name in kwargs}
        defaults = OPERATIONS[operation].signature.parameters
        everything: Any = None
        if all(paging[name] == defaults[name].default for name in paging if name not in self._accepts[operation]):
            answer = await self._call_store(operation, *args, **kwargs)
            if not isinstance(answer, list):
                return answer
            everything = None if paging else cast("list[Any]", answer)
        # a store that does not page, or returns a plain list, which does not say how many there are in all
        sort_by, order, limit, offset = (paging.get(name, defaults[name].default) for name in _PAGE)
        sort_by = check_page(_LISTED[operation], sort_by, limit, offset)
        if everything is None:
            rest = {name: value for name, value in kwargs.items() if name not in _PAGE}
            everything = await self._call_store(operation, *args, **rest)
        items, total = page_of(everything, sort_by, order == "desc", limit, offset)
        return AnyPage(items=items, limit=limit, offset=offset, total=total)

    async def _call_store(self, operation: str, *args: object, **kwargs: object) -> Any:
        """Call an operation of the store with the arguments that differ from their defaults."""
        if not self._has(operation) and operation != "statistics":
            if operation in _OF_RUNS:
                raise keeps_no_runs(self.store)
            raise NotImplementedError(f"{type(self.store).__name__} does not implement {operation}")
        bound = OPERATIONS[operation].signature.bind(None, *args, **kwargs)
        for name, value in list(bound.arguments.items()):
            default = bound.signature.parameters[name].default
            if value is UNSET or value is default or (type(value) is type(default) and value == default):
                del bound.arguments[name]
        by_name = {name: value for name, value in bound.kwargs.items() if self._takes(operation, name)}
        method: Callable[..., Awaitable[Any]] = getattr(self.store, operation)
        waits = operation == "wait_for_rollouts" or "timeout" in by_name
        async with contextlib.nullcontext() if self._turn is None or waits else self._turn:
            return await method(*bound.args[1:], **by_name)

    def _has(self, operation: str) -> bool:
        return bool(self._accepts[operation])

    def _takes(self, operation: str, name: str) -> bool:
        """Return True if the store accepts an argument, False if the argument can be omitted.

        Raises:
            BadRequestError: omitting it would change the result.
        """
        if name in self._accepts[operation]:
            return True
        if (operation, name) == ("update_worker", "attempts"):
            return False  # such a store renews all claims of the worker, as for a worker that names none
        if name != "run_id":
            raise BadRequestError(f"{type(self.store).__name__}.{operation} does not support {name!r}; omit it")
        if not self._warned_of_runs:
            self._warned_of_runs = True
            logger.warning("%s does not separate runs; use a separate store for each run", type(self.store).__name__)
        return False

    # --- work ------------------------------------------------------------------------------------------------------

    @override
    async def enqueue_many_rollouts(self, rollouts) -> list[Rollout]:
        for name in ("priority", "not_before"):
            if name not in self._accepts["enqueue_rollout"] and any(getattr(request, name) for request in rollouts):
                raise BadRequestError(f"{type(self.store).__name__} does not support the argument {name!r}; omit it")
        if self._form("enqueue_many_rollouts") == "enqueue_many_rollouts":
            return await self._call_store("enqueue_many_rollouts", rollouts)
        with _several_calls():
            return [await self._call_store("enqueue_rollout", **_arguments_of(request)) for request in rollouts]

    async def _enqueue(self, arguments: dict[str, Any]) -> Rollout:
        with valid("the rollout"):
            request = EnqueueRolloutRequest(**arguments)
        if self._form("enqueue_rollout") == "enqueue_many_rollouts":
            return (await self._call_store("enqueue_many_rollouts", [request]))[0]
        return await self._call_store("enqueue_rollout", **_arguments_of(request))

    @override
    async def dequeue_rollout(self, worker_id=None, *, timeout=0.0, run_id=None) -> AttemptedRollout | None:
        with _several_calls():
            claims = await self._wait_for_claims(1, worker_id, run_id, timeout, self._form("dequeue_rollout"))
        return claims[0] if claims else None

    @override
    async def dequeue_many_rollouts(
        self, *, limit=1, worker_id=None, timeout=0.0, run_id=None
    ) -> list[AttemptedRollout]:
        if limit <= 0:
            return []
        with _several_calls():
            return await self._wait_for_claims(limit, worker_id, run_id, timeout, self._form("dequeue_many_rollouts"))

    def _form(self, operation: str) -> str:
        """Return the form of an operation (for one object or for many) that is called on the store."""
        return self._preferred[operation] or operation

    async def _wait_for_claims(
        self, limit: int, worker_id: str | None, run_id: str | None, timeout: float, way: str
    ) -> list[AttemptedRollout]:
        """Claim with an operation. It is called repeatedly, with pauses, if it cannot wait itself."""
        if "timeout" in self._accepts[way]:
            return await self._claim(way, limit, worker_id, run_id, timeout)
        end, delays = time.monotonic() + timeout, backoff_delays(SHORTEST_PAUSE, LONGEST_PAUSE)
        while True:
            request = asyncio.ensure_future(self._claim(way, limit, worker_id, run_id))
            try:
                claims = await asyncio.shield(request)
            except asyncio.CancelledError:  # the claim is awaited, and its rollouts go back to the queue
                for claim in await request:
                    await self._call_store("update_rollout", claim.rollout_id, status="requeuing")
                raise
            remaining = end - time.monotonic()
            if claims or not remaining > 0:
                return claims
            await asyncio.sleep(min(remaining, next(delays)))

    async def _claim(
        self, way: str, limit: int, worker_id: str | None, run_id: str | None, timeout: float = 0.0
    ) -> list[AttemptedRollout]:
        if way == "dequeue_many_rollouts":
            return await self._call_store(way, limit=limit, worker_id=worker_id, timeout=timeout, run_id=run_id)
        claims: list[AttemptedRollout] = []
        while len(claims) < limit:
            claim = await self._call_store(way, worker_id, timeout=0.0 if claims else timeout, run_id=run_id)
            if claim is None:
                break
            claims.append(claim)
        return claims

    # --- evidence --------------------------------------------------------------------------------------------------

    @override
    async def add_span(self, span) -> Span | None:
        stored = await self._add(await self._numbered([span]), self._form("add_span"))
        return stored[0] if stored else None

    @override
    async def add_many_spans(self, spans) -> list[Span]:
        return await self._add(await self._numbered(spans), self._form("add_many_spans"))

    async def _add(self, spans: Sequence[Span], way: str) -> list[Span]:
        """Pass spans to one of the store's operations and return those that were new."""
        if way == "add_many_spans":
            return await self._call_store(way, spans)
        stored: list[Span | None] = []
        for span in spans:
            if way == "add_otel_span" and is_readable(span):
                ended = readable_span(span)
                stored.append(await self._call_store(way, span.rollout_id, span.attempt_id, ended, span.sequence_id))
            else:
                stored.append(await self._call_store("add_span", span))
        return [span for span in stored if span is not None]

    @override
    async def get_next_span_sequence_id(self, rollout_id, attempt_id) -> int:
        return (await self.get_many_span_sequence_ids([(rollout_id, attempt_id)]))[0]

    @override
    async def get_many_span_sequence_ids(self, rollout_attempt_ids) -> list[int]:
        if not self._has("get_many_span_sequence_ids") and not self._has("get_next_span_sequence_id"):
            return [await self._next_number(rollout_id) for rollout_id, _ in rollout_attempt_ids]
        if self._form("get_many_span_sequence_ids") == "get_many_span_sequence_ids":
            return await self._call_store("get_many_span_sequence_ids", rollout_attempt_ids)
        return [await self._call_store("get_next_span_sequence_id", *pair) for pair in rollout_attempt_ids]

    async def _next_number(self, rollout_id: str) -> int:
        """Return a number greater than those of stored spans and those already assigned."""
        stored = [span.sequence_id for span in await self._call_store("query_spans", rollout_id)]
        number = self._numbers[rollout_id] = max(0, self._numbers.get(rollout_id, 0), *stored) + 1
        return number

    async def _numbered(self, spans: Sequence[Span]) -> list[Span]:
        """Return the spans with missing numbers added; unchanged for a store that numbers spans itself."""
        if self._has("query_events"):  # made for the present contract, or a subclass of one that was
            return list(spans)
        asking = [(span.rollout_id, span.attempt_id) for span in spans if span.sequence_id < 0]
        numbers = iter(await self.get_many_span_sequence_ids(asking) if asking else ())
        return [s.model_copy(update={"sequence_id": next(numbers)}) if s.sequence_id < 0 else s for s in spans]

    # --- outcomes --------------------------------------------------------------------------------------------------

    async def _update_attempt(self, arguments: dict[str, Any]) -> Attempt:
        ending = {name: value for name, value in arguments.items() if name in _ENDING and value is not UNSET}
        if ending and not self._accepts["update_attempt"] >= _ENDING:  # they are kept in the metadata
            arguments = {name: value for name, value in arguments.items() if name not in _ENDING}
            metadata = arguments.get("metadata", UNSET)
            if isinstance(metadata, Unset):
                attempts: list[Attempt] = list(await self._call_store("query_attempts", arguments["rollout_id"]))
                matches = [a for a in attempts if arguments["attempt_id"] in (a.attempt_id, "latest")]
                metadata = max(matches, key=lambda attempt: attempt.sequence_id).metadata if matches else None
            if isinstance(ending.get("error"), AttemptError):
                ending["error"] = ending["error"].model_dump()
            previous: dict[str, Any] = dict(metadata or {})
            arguments["metadata"] = {**previous, _OUTCOME_KEY: {**previous.get(_OUTCOME_KEY, {}), **ending}}
        return await self._call_store("update_attempt", **arguments)


def _with_outcomes(answer: object) -> Any:
    """Return the result of a store, with outcomes read from the metadata of its attempts."""
    if isinstance(answer, Attempt):
        outcome = (answer.metadata or {}).get(_OUTCOME_KEY)
        return Attempt.model_validate({**answer.model_dump(), **outcome}) if outcome else answer
    if isinstance(answer, AttemptedRollout):
        attempt = _with_outcomes(answer.attempt)
        return answer if attempt is answer.attempt else answer.model_copy(update={"attempt": attempt})
    if isinstance(answer, PaginatedResult):
        page = cast("PaginatedResult[Any]", answer)
        return page.model_copy(update={"items": [_with_outcomes(item) for item in page.items]})
    return answer


@forward_operations
class LightningStoreScoped(StoreWrapper):
    """A store that adds the `run_id` of one run to operations that accept it, unless the caller sets it."""

    def __init__(self, store: LightningStore, run_id: str | None) -> None:
        super().__init__(store)
        self.run_id = run_id
        self._whole = complete(store)

    def _call(self, operation: str, args: tuple[object, ...], kwargs: dict[str, object]) -> Awaitable[object]:
        method = getattr(self._whole, operation)  # it knows the whole contract
        if self.run_id is None:
            return method(*args, **kwargs)
        parameters = OPERATIONS[operation].signature.parameters
        if operation == "enqueue_many_rollouts":
            rollouts = cast("Sequence[EnqueueRolloutRequest]", args[0] if args else kwargs["rollouts"])
            mine = {"run_id": self.run_id}
            return method([r if r.run_id is not None else r.model_copy(update=mine) for r in rollouts])
        if "run_id" in parameters and parameters["run_id"].default is not inspect.Parameter.empty:
            kwargs.setdefault("run_id", self.run_id)
        elif "filter" in parameters:
            chosen = filter_of(cast("RolloutFilter | None", kwargs.get("filter")))
            if "run_id" not in chosen.model_fields_set:
                kwargs["filter"] = chosen.model_copy(update={"run_id": self.run_id})
        return method(*args, **kwargs)


# --- spans as OpenTelemetry's, for a store that overrides `add_otel_span` ------------------------------------------

_IDS = re.compile(r"[0-9a-f]{32} [0-9a-f]{16}(?: [0-9a-f]{16})?")


def is_readable(span: Span) -> bool:
    """Return True if the ids of the span are valid in OpenTelemetry. Programs that create spans may use other ids."""
    return _IDS.fullmatch(" ".join(filter(None, (span.trace_id, span.span_id, span.parent_id)))) is not None


def readable_span(span: Span) -> ReadableSpan:
    """Return the span as an ended OpenTelemetry span, without the extra fields of a stored span.

    Raises:
        ValueError: an id is not valid; see `is_readable`.
    """
    context = span.context or _local(span.trace_id, span.span_id)
    parent = span.parent or (_local(span.trace_id, span.parent_id) if span.parent_id else None)
    scope = span.scope or {}
    return ReadableSpan(
        name=span.name,
        context=_context(context),
        parent=_context(parent) if parent else None,
        resource=Resource(span.resource.attributes, span.resource.schema_url),
        attributes=dict(span.attributes),
        events=[Event(event.name, dict(event.attributes), _nanoseconds(event.timestamp)) for event in span.events],
        links=[Link(_context(link.context), link.attributes and dict(link.attributes)) for link in span.links],
        kind=SpanKind.__members__.get(span.kind or "", SpanKind.INTERNAL),
        status=Status(StatusCode[span.status.status_code], span.status.description),
        start_time=_nanoseconds(span.start_time),
        end_time=_nanoseconds(span.end_time),
        instrumentation_scope=InstrumentationScope(
            scope["name"], scope.get("version"), scope.get("schema_url"), scope.get("attributes")
        )
        if scope.get("name")
        else None,
    )


def _local(trace_id: str, span_id: str) -> types.SpanContext:
    return types.SpanContext(trace_id=trace_id, span_id=span_id, is_remote=False, trace_state={})


def _context(context: types.SpanContext) -> SpanContext:
    return SpanContext(
        int(context.trace_id, 16),
        int(context.span_id, 16),
        context.is_remote,
        TraceFlags(TraceFlags.SAMPLED),
        TraceState(list(context.trace_state.items())),
    )


def _nanoseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e9)
