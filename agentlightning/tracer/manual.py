"""Traces that a program opens and closes manually: one attempt of one rollout at a time, without an event loop.

    tracer = OtelTracer(rollout_id=rollout.rollout_id, store_client=store)
    tracer.open_rollout(user_id="user-123")
    tracer.open_attempt()
    tracer.emit_span("tool_execution", {"tool": "web_search"})
    tracer.close_attempt()
    tracer.close_rollout()

Between `open_attempt` and `close_attempt` the emitters also work (`emit_reward`, `operation`). The rollout and the
attempt must exist in the store, which creates and ends them (`start_rollout`, `finish_rollout`). Without a store, any
ids are accepted, and the spans are kept for `get_last_trace`. With an event loop, use `Tracer.trace_context` instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from opentelemetry import trace as trace_api

from agentlightning.errors import BadRequestError, NotFoundError
from agentlightning.store.base import LightningStore
from agentlightning.store.wrappers import complete
from agentlightning.tracer.base import Tracer
from agentlightning.tracer.delivery import TraceDeliveryError, deliver
from agentlightning.tracer.scope import TraceScope, entered
from agentlightning.tracer.store_thread import StoreThread
from agentlightning.types import Attributes, SpanCoreFields, TraceStatus
from agentlightning.utils.attributes import flatten_attributes, sanitize_attributes

T = TypeVar("T")

last_scope: ContextVar[TraceScope | None] = ContextVar("agentlightning_last_scope", default=None)
"""The scope that was opened last in this context."""
ANSWER_SECONDS = 60.0
"""Seconds to wait for a response of the store."""
_ATTEMPT_NUMBER = "attempt.sequence_id"


@dataclass
class _Opened:
    """The open rollout, and its open attempt."""

    rollout_id: str
    notes: Attributes
    """Attributes of every span."""
    thread: StoreThread | None
    own_worker: bool
    """True if the tracer was initialised for this rollout, and is torn down with it."""
    scope: TraceScope | None = None
    attempt_notes: Attributes = field(default_factory=dict[str, Any])

    def ask(self, work: Callable[[LightningStore], Coroutine[object, None, T]], seconds: float = ANSWER_SECONDS) -> T:
        """Return the store's response, requested in a separate thread, because the caller may block an event loop."""
        assert self.thread is not None
        return self.thread.call(work).result(seconds)


class ManualTracing(Tracer):
    """The part of a tracer that opens and closes attempts manually."""

    rollout_id: str | None = None
    """The only rollout that the tracer accepts; None is any."""
    attempt_id: str | None = None
    """The only attempt that the tracer accepts; None is any."""
    _opened: _Opened | None = None
    _default_store: LightningStore | None = None
    _otel_tracer: trace_api.Tracer | None = None
    """None before `init_worker`."""
    _last: TraceScope | None = None

    def open_rollout(self, rollout_id: str | None = None, **attributes: object) -> None:
        """Open a rollout of the store; other attributes, such as `user_id`, are added to each of its spans.

        Raises:
            RuntimeError: another rollout is open here.
            BadRequestError: the id is missing, or differs from that of the tracer.
            NotFoundError: the store has no such rollout.
        """
        if self._opened is not None:
            raise RuntimeError(f"Rollout {self._opened.rollout_id} is already open; call close_rollout() first")
        rollout_id = self._agreed("rollout_id", self.rollout_id, rollout_id)
        if rollout_id is None:
            raise BadRequestError(
                "open_rollout needs a rollout_id, such as (await store.start_rollout(input)).rollout_id"
            )
        store = self._bound_store()
        thread = None if store is None else StoreThread(store, "agentlightning-manual-trace")
        opened = _Opened(rollout_id, _as_attributes(attributes), thread, own_worker=self._otel_tracer is None)
        try:
            if thread is not None and opened.ask(lambda store: store.get_rollout_by_id(rollout_id)) is None:
                raise NotFoundError(
                    f"Rollout {rollout_id} not found in the store. Create a rollout with await "
                    "store.start_rollout(input) or enqueue_rollout(input)"
                )
            if opened.own_worker:
                self.init()
                self.init_worker(0, store)
        except BaseException:  # raised again: a thread that nobody can reach must not stay
            if thread is not None:
                thread.close()
            raise
        self._opened = opened

    def open_attempt(self, attempt_id: str | None = None, sequence_id: int | None = None) -> None:
        """Open an attempt of the open rollout; None is the latest in the store. `sequence_id` is its number, from 1.

        Raises:
            RuntimeError: no rollout is open, or an attempt is.
            BadRequestError: neither an id nor a store, or the id or the number differs from the expected one.
            NotFoundError: the rollout has no such attempt.
            ValueError: a trace is already open in this context.
        """
        opened = self._rollout_open("open_attempt")
        if opened.scope is not None:
            raise RuntimeError(f"Attempt {opened.scope.attempt_id} is already open; call close_attempt() first")
        attempt_id = self._agreed("attempt_id", self.attempt_id, attempt_id)
        number = sequence_id
        if opened.thread is not None:
            attempts = opened.ask(lambda store: store.query_attempts(opened.rollout_id))
            numbers = {attempt.attempt_id: attempt.sequence_id for attempt in attempts}
            attempt_id = attempt_id or next(reversed(numbers), None)
            if attempt_id not in numbers:
                has = (
                    f"it has {', '.join(numbers)}" if numbers else "it has none; await store.start_attempt(rollout_id)"
                )
                raise NotFoundError(f"Attempt {attempt_id} not found for rollout {opened.rollout_id}: {has}")
            number = numbers[attempt_id]
            if sequence_id not in (None, number):
                raise BadRequestError(f"Attempt {attempt_id} has the sequence_id {number}, not {sequence_id}")
        if attempt_id is None:
            raise BadRequestError("open_attempt needs an attempt_id: without a store, the latest attempt is unknown")
        opened.attempt_notes = {} if number is None else {_ATTEMPT_NUMBER: number}
        scope = TraceScope(self, self._bound_store(), opened.rollout_id, attempt_id, loop=None)
        scope.open()
        opened.scope = scope
        self._opened_scope(scope)

    def emit_span(
        self, name: str, attributes: Mapping[str, object] | None = None, status: TraceStatus | None = None
    ) -> SpanCoreFields:
        """Record a span that begins and ends now, in the open attempt. Nested attributes are flattened.

        Raises:
            RuntimeError: no attempt is open.
        """
        opened, scope = self._attempt_open("emit_span")
        values = {**opened.notes, **opened.attempt_notes, **_as_attributes(attributes or {})}
        with entered(scope):
            return self.create_span(name, attributes=values, status=status)

    def close_attempt(self) -> None:
        """Close the attempt and send its spans to the store. Blocks until they are stored. Does not end the attempt.

        Raises:
            RuntimeError: no attempt is open.
            TraceDeliveryError: the store did not accept them; `get_last_trace` has them.
        """
        opened, scope = self._attempt_open("close_attempt")
        opened.scope = None
        scope.close()
        if opened.thread is None:
            return

        async def to_store(store: LightningStore) -> None:
            scope.store = store  # the handle of the thread
            await deliver(scope, self.store_unreachable_timeout)

        try:
            opened.ask(to_store, self.store_unreachable_timeout + ANSWER_SECONDS)
        except (TimeoutError, asyncio.CancelledError) as error:
            raise TraceDeliveryError(
                f"The store did not accept the spans of rollout {scope.rollout_id}, attempt {scope.attempt_id} in time",
                unanswered=True,
            ) from error

    def close_rollout(self) -> None:
        """Close the rollout; then another one may be opened. Does not end the rollout in the store.

        Raises:
            RuntimeError: no rollout is open, or an attempt of it is still open.
        """
        opened = self._rollout_open("close_rollout")
        if opened.scope is not None:
            raise RuntimeError(f"Attempt {opened.scope.attempt_id} is still open; call close_attempt() first")
        self._opened = None
        if opened.thread is not None:
            opened.thread.close()
        if opened.own_worker:
            self.teardown_worker(0)
            self.teardown()

    # --- state of the tracer -----------------------------------------------------------------------------------------

    def _bound_store(self) -> LightningStore | None:
        """Return the store of the worker, else that of the constructor."""
        if self._store is not None or self._default_store is None:
            return self._store
        return complete(self._default_store)

    def _opened_scope(self, scope: TraceScope) -> None:
        """Keep the scope for `get_last_trace`."""
        self._last = scope
        last_scope.set(scope)

    def _agreed(self, name: str, own: str | None, argument: str | None) -> str | None:
        """Return the id to use; if the tracer has one, it must match."""
        if own is not None and argument is not None and own != argument:
            raise BadRequestError(
                f"This tracer accepts only {name}={own!r}; got {argument!r}. Create another tracer for it"
            )
        return own if argument is None else argument

    def _rollout_open(self, what: str) -> _Opened:
        if self._opened is None:
            raise RuntimeError(f"{what}(): no rollout is open here; call open_rollout(rollout_id=...) first")
        return self._opened

    def _attempt_open(self, what: str) -> tuple[_Opened, TraceScope]:
        opened = self._rollout_open(what)
        if opened.scope is None:
            raise RuntimeError(f"{what}(): no attempt is open here; call open_attempt(attempt_id=...) first")
        return opened, opened.scope


def _as_attributes(values: Mapping[str, object]) -> Attributes:
    return sanitize_attributes(flatten_attributes(values))
