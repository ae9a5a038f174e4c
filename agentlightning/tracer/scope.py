"""The scope of one attempt, which collects the spans of the current context.

A context variable contains the scope, so the spans of asyncio tasks and of threads that copy their context are never
mixed up, regardless of the number of rollouts in one process. A span with an open parent belongs to its parent's scope.
A plain thread, which does not copy the context, is in the scope in which it was started (`tracer/started.py`). One that
was started outside of all scopes is in the scope of its current OpenTelemetry span, else in the only open scope of the
process, if there is exactly one. A closed scope stays closed: later spans of a remaining task or thread are refused.

Spans are collected without the store, and delivered together when the scope ends (`tracer/delivery.py`).

**Numbers.** All spans get their number (`sequence_id`) from the store, in start order: those of the agent at delivery,
so after the model calls, which the gateway numbers at their arrival. A reward gets its number when it is emitted, so it
is after the calls that it judges and before later calls; `emit_reward` waits for it, up to a limit
(`tracer/sequence_ids.py`). No other emission waits.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from opentelemetry import trace as trace_api
from opentelemetry.sdk.trace import ReadableSpan

from agentlightning.semconv import AGL_ANNOTATION, AGL_SPANS_CUT, LightningCutAttributes, LightningSpanAttributes
from agentlightning.tracer.conversion import span_of
from agentlightning.tracer.sequence_ids import PendingId, SequenceIds, running_loop
from agentlightning.tracer.started import note_origins, origin
from agentlightning.types import Attributes, Span, SpanCoreFields, TraceStatus

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore

logger = logging.getLogger(__name__)

MOST_SPANS = 20_000
"""Number of spans that one scope keeps, in addition to later rewards. A last span `AGL_SPANS_CUT` counts the others."""
UNNUMBERED = -1
"""Sequence id of a span that the store numbers later."""
DUMMY_ROLLOUT_ID = "rollout-dummy"
DUMMY_ATTEMPT_ID = "attempt-dummy"
_REWARD = LightningSpanAttributes.REWARD.value + ".0.value"

_current: ContextVar[TraceScope | None] = ContextVar("agentlightning_scope", default=None)
_open: set[TraceScope] = set()
_routes: dict[int, TraceScope] = {}
"""Scope in which each span began, by OpenTelemetry span id; a span may end in another thread."""


@dataclass(slots=True, eq=False)
class Piece:
    """One finished span of a scope."""

    span: ReadableSpan | Span
    start_order: int
    """Position in the order of start; 0 for the first span of the scope."""
    pending_id: PendingId | None = None
    """The requested number, for rewards."""


class TraceScope:
    """Spans of one attempt. Owned by the context that opened it; any thread may add to it while it is open."""

    def __init__(
        self,
        tracer: object,
        store: LightningStore | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        ids: SequenceIds | None = None,
        *,
        loop: asyncio.AbstractEventLoop | Literal["running"] | None = "running",
    ) -> None:
        """`loop` is used to request numbers; if None, all numbers are assigned at delivery."""
        self.tracer = tracer
        self.store = store
        self.rollout_id = rollout_id
        self.attempt_id = attempt_id
        self.pieces: list[Piece] = []
        """Spans in the order in which they ended."""
        self.dropped = 0
        """Number of spans that were not kept because there were too many."""
        self.refused = 0
        """Number of spans after the end, from remaining tasks and threads."""
        self._ids = ids or SequenceIds()
        self._begun: dict[int, int] = {}
        self._count = 0
        self._lock = threading.Lock()
        self._loop = running_loop() if loop == "running" else loop
        self._closed = False
        self._pid = os.getpid()
        self._last_words: dict[int, Callable[[], None]] = {}

    # --- where it is open --------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True while spans are accepted; false in a forked child."""
        return not self._closed and self._pid == os.getpid()

    @property
    def delivers(self) -> bool:
        """True if its spans are sent to a store."""
        return self.store is not None and self.rollout_id is not None and self.attempt_id is not None

    def open(self) -> None:
        """Make this the scope of the current context.

        Raises:
            ValueError: the context already has an open scope.
        """
        present = _current.get()
        if present is not None and present.is_open:
            raise ValueError(
                "An active tracer is already set. Cannot set a new one. "
                f"The context of rollout {present.rollout_id} is still open here; leave it first."
            )
        note_origins(_current)
        _current.set(self)
        _open.add(self)

    def close(self) -> None:
        """Accept no more spans; those that have not ended are dropped. May be called twice."""
        for say in list(self._last_words.values()):
            say()
        if self.dropped and not self._closed:
            now = time.time()
            counts: Attributes = {
                LightningCutAttributes.KEPT.value: len(self.pieces),
                LightningCutAttributes.LEFT_OUT.value: self.dropped,
            }
            status = TraceStatus(status_code="OK")
            fields = SpanCoreFields(name=AGL_SPANS_CUT, status=status, attributes=counts, start_time=now, end_time=now)
            self.append(self.span_from(fields))
        self._closed = True
        _open.discard(self)
        if _current.get() is self:
            _current.set(None)
        with self._lock:
            unfinished, self._begun = list(self._begun), {}
        for span_id in unfinished:
            _routes.pop(span_id, None)
        if unfinished:
            logger.debug("[Rollout %s] %d spans did not end before the trace ended", self.rollout_id, len(unfinished))

    def remember_open(self, owner: object, end: Callable[[], None]) -> None:
        """Call `end` when the scope closes, unless `forget_open` was called; for spans that nothing else may end."""
        self._last_words[id(owner)] = end

    def forget_open(self, owner: object) -> None:
        """Undo `remember_open`."""
        self._last_words.pop(id(owner), None)

    # --- collected spans ---------------------------------------------------------------------------------------

    def begin(self, span_id: int) -> None:
        """Record that an OpenTelemetry span began here."""
        with self._lock:
            self._begun[span_id] = self._next_order()
        _routes[span_id] = self

    def end(self, span: ReadableSpan) -> None:
        """Keep an OpenTelemetry span that began here."""
        with self._lock:
            order = self._begun.pop(_span_id(span), None)
        if order is not None and self.is_open:
            self._keep(span, order, emitted=True)

    def append(self, span: Span, *, emitted: bool = False) -> None:
        """Keep a manually created span. Unless its `sequence_id` is 0 or more, the store numbers it at delivery.
        If the agent `emitted` it, it is treated as if OpenTelemetry had created it."""
        with self._lock:
            order = self._next_order()
        self._keep(span, order, emitted)

    def span_from(self, fields: SpanCoreFields) -> Span:
        """Return a span of this scope with a new id and without a number."""
        number = UNNUMBERED if self.delivers else self._count
        return Span.from_core_fields(
            fields,
            rollout_id=self.rollout_id or DUMMY_ROLLOUT_ID,
            attempt_id=self.attempt_id or DUMMY_ATTEMPT_ID,
            sequence_id=number,
        )

    def spans(self) -> list[Span]:
        """Return the finished spans so far, in the order in which they ended; unnumbered ones have -1 (or count up
        from 0 when the scope has no store)."""
        return [self.as_span(piece) for piece in list(self.pieces)]

    def as_span(self, piece: Piece) -> Span:
        """Return the span of a piece as a `Span`; converted once."""
        if not isinstance(piece.span, Span):
            number = UNNUMBERED if self.delivers else piece.start_order
            rollout_id, attempt_id = self.rollout_id or DUMMY_ROLLOUT_ID, self.attempt_id or DUMMY_ATTEMPT_ID
            piece.span = span_of(piece.span, rollout_id, attempt_id, number)
        return piece.span

    def _keep(self, span: ReadableSpan | Span, order: int, emitted: bool) -> None:
        reward = span.name == AGL_ANNOTATION and _REWARD in (span.attributes or ())
        if len(self.pieces) >= MOST_SPANS and emitted and not reward:
            self._drop()
            return
        if len(self.pieces) >= 2 * MOST_SPANS and emitted:  # rewards only: the last one is the final one
            self._drop()
            self.pieces.pop()
        piece = Piece(span, order)
        store, rollout_id, attempt_id, loop = self.store, self.rollout_id, self.attempt_id, self._loop
        address = None if store is None or rollout_id is None or attempt_id is None else (store, rollout_id, attempt_id)
        if reward and emitted and address is not None and loop is not None and not loop.is_closed():
            piece.pending_id = self._ids.request(*address, loop)
        self.pieces.append(piece)

    def _drop(self) -> None:
        self.dropped += 1
        if self.dropped == 1:
            logger.warning(
                "[Rollout %s] more than %d spans in one trace: of further spans, only rewards are kept",
                self.rollout_id,
                MOST_SPANS,
            )

    def refuse(self) -> None:
        """Count a span of a remaining task or thread; the first one logs a warning."""
        self.refused += 1
        if self.refused == 1:
            logger.warning(
                "[Rollout %s] the rollout has ended, but its thread %s still emits spans; they are discarded",
                self.rollout_id,
                threading.current_thread().name,
            )

    def _next_order(self) -> int:
        self._count += 1
        return self._count - 1


def scope_for(parent_span_id: int) -> TraceScope | None:
    """Return the scope of a span that begins here: that of its parent, if the parent is open, else `current_scope`."""
    scope = _routes.get(parent_span_id)
    return scope if scope is not None and scope.is_open else current_scope()


def current_scope() -> TraceScope | None:
    """Return the open scope of this context. A plain thread is in the scope in which it was started; one that was
    started in none is in the scope of its current OpenTelemetry span, else in the only open scope of the process."""
    scope = _current.get()
    if scope is not None:
        return scope if scope.is_open else None
    own: TraceScope | None = origin.get()
    if own is not None:
        return own if own.is_open and running_loop() in (None, own._loop) else None
    if not _open:
        return None
    scope = _routes.get(trace_api.get_current_span().get_span_context().span_id)
    if scope is not None and scope.is_open:
        return scope
    if len(_open) != 1 or threading.current_thread() is threading.main_thread() or running_loop() is not None:
        return None
    only = next(iter(tuple(_open)), None)
    return only if only is not None and only.is_open else None


def ended_scope() -> TraceScope | None:
    """Return the scope in which this task or thread was started if it has ended; else None."""
    scope: TraceScope | None = _current.get() or origin.get()
    return scope if scope is not None and scope._closed else None


def spans_left_out(spans: Sequence[Span]) -> int:
    """Return the number of spans of an attempt that were not kept because it had too many."""
    counts = [
        span.attributes.get(LightningCutAttributes.LEFT_OUT.value) for span in spans if span.name == AGL_SPANS_CUT
    ]
    return sum(count for count in counts if isinstance(count, int))


@contextmanager
def entered(scope: TraceScope) -> Generator[None]:
    """Set `scope` in this context for the body; for a plain thread that found its scope without a context."""
    token = None if _current.get() is scope else _current.set(scope)
    try:
        yield
    finally:
        if token is not None:
            _current.reset(token)


def scope_of(span: ReadableSpan) -> TraceScope | None:
    """Return the scope in which an OpenTelemetry span began, and drop the entry."""
    return _routes.pop(_span_id(span), None)


def _span_id(span: ReadableSpan) -> int:
    context = span.get_span_context()
    return context.span_id if context is not None else 0
