"""Sends the spans of a scope to the store in one batch, with retries and a deadline, and copies to the mirror.

Before that, texts that stores cannot hold are repaired, keys with a known format are hidden, and the span lists the
changed places.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentlightning.base.terminal import counted
from agentlightning.errors import AgentLightningError, BusyError
from agentlightning.semconv import CHANGED_TEXTS, HIDDEN_KEYS
from agentlightning.store.base import LightningStore, recording
from agentlightning.tracer.mirror import is_mirroring, mirror_spans
from agentlightning.tracer.scope import TraceScope
from agentlightning.types import Span
from agentlightning.utils.backoff import Outage, retry_for
from agentlightning.utils.texts import attributes_without_keys, fitting, fitting_attributes, without_keys

logger = logging.getLogger(__name__)

_METRICS_SECONDS = 5.0
BATCH = 512
"""Number of spans per request; keeps a request below the store's limit for bodies."""
Text = Callable[[str], str]
"""Converts a text; returns the same object if nothing changes."""
Attributes = Callable[[Mapping[str, object]], tuple[dict[str, object], list[str]] | None]
"""Converts attributes, and returns them with the changed keys; None if nothing changes."""


class TraceDeliveryError(AgentLightningError, RuntimeError):
    """The spans of an attempt did not reach the store; its trace is incomplete."""

    def __init__(self, message: str, *, unanswered: bool = False) -> None:
        super().__init__(message)
        self.unanswered = unanswered
        """True if the store was unreachable for too long; false if it refused the spans."""


async def deliver(scope: TraceScope, seconds: float) -> None:
    """Store the spans of a closed scope, in start order, and add the numbers that the store assigned to them.

    Repeating it after a failure is safe: the store identifies spans by their ids.

    Raises:
        TraceDeliveryError: the store refused them, or did not respond for `seconds`.
    """
    pieces = sorted(scope.pieces, key=lambda piece: piece.start_order)
    if not pieces or scope.store is None:
        return
    waiting = [  # the numbers requested for rewards; the store assigns the missing ones
        (piece, asyncio.wrap_future(id) if isinstance(id, concurrent.futures.Future) else id)
        for piece in pieces
        if (id := piece.pending_id) is not None
    ]
    if waiting:
        await asyncio.wait([future for _, future in waiting], timeout=seconds / 2)
    for piece, future in waiting:
        if future.done() and not future.cancelled() and future.exception() is None:
            scope.as_span(piece).sequence_id = future.result()
        else:
            future.cancel()
            logger.warning(
                "[Rollout %s] a reward got no sequence_id when it was emitted; it is ordered after all calls",
                scope.rollout_id,
            )
    stored = await deliver_spans(scope.store, [scope.as_span(piece) for piece in pieces], seconds)
    numbered = {span.span_id: span for span in stored}
    for piece in pieces:
        if isinstance(piece.span, Span) and piece.span.span_id in numbered:
            piece.span = numbered[piece.span.span_id]
    await _show_observers(scope, scope.store)


async def _show_observers(scope: TraceScope, store: LightningStore) -> None:
    """Pass the spans to the observers of the tracer; return when the metrics that they record are in the store."""
    earlier = set(recording)
    for observer in getattr(scope.tracer, "_observers", ()):
        observer.store = store
        for span in scope.spans():
            try:
                observer.on_trace_end(span)
            except Exception:  # the boundary: an observer must not spoil the attempt
                logger.exception("[Rollout %s] the observer %s failed", scope.rollout_id, type(observer).__name__)
    here = asyncio.get_running_loop()
    if mine := {task for task in recording - earlier if task.get_loop() is here}:
        done, late = await asyncio.wait(mine, timeout=_METRICS_SECONDS)
        failed = [error for task in done if (error := task.exception()) is not None]
        if failed or late:
            text = "[Rollout %s] metrics not recorded: %d; first error: %r"
            logger.warning(text, scope.rollout_id, len(failed) + len(late), next(iter(failed), "no response in time"))


async def deliver_spans(store: LightningStore, spans: Sequence[Span], seconds: float) -> list[Span]:
    """Store spans of one attempt and return those that were new, with their numbers.

    Raises:
        TraceDeliveryError: the store refused them, or did not respond for `seconds`.
    """
    stored: list[Span] = []
    outage = Outage(seconds)
    spans = [span_without_keys(mended_span(span)) for span in spans]
    try:
        for first in range(0, len(spans), BATCH):
            batch = spans[first : first + BATCH]
            stored += await retry_for(outage, lambda batch=batch: store.add_many_spans(batch), "spans")
    except Exception as error:  # the boundary: any error of the store means that evidence is missing
        raise TraceDeliveryError(
            f"{counted(len(spans), 'span')} of rollout {spans[0].rollout_id}, attempt {spans[0].attempt_id} "
            f"not delivered: {type(error).__name__}: {error}",
            unanswered=isinstance(error, (OSError, BusyError)),
        ) from error
    finally:
        if is_mirroring():
            numbered = {span.span_id: span for span in stored}
            mirror_spans([numbered.get(span.span_id, span) for span in spans])
    return stored


# --- texts of a span ----------------------------------------------------------------------------------------------


def mended_span(span: Span) -> Span:
    """Return the span with texts that UTF-8 can hold; the same object if there is nothing to repair."""
    return _rewritten(span, fitting, fitting_attributes, CHANGED_TEXTS, names=True)


def span_without_keys(span: Span) -> Span:
    """Return the span without keys of a known format, in any place; the same object if it has none.

    Token ids and numbers are never touched.
    """
    return _rewritten(span, without_keys, attributes_without_keys, HIDDEN_KEYS, names=False)


def _rewritten(span: Span, text: Text, attributes: Attributes, marker: str, *, names: bool) -> Span:
    """Apply both functions to all texts of a span (names only if requested) and list the changes under `marker`."""
    keys: list[str] = []
    changes: dict[str, object] = {}
    if names and (name := text(span.name)) is not span.name:
        changes["name"] = name
        keys.append("name")
    description = span.status.description
    if description is not None and (new_text := text(description)) is not description:
        changes["status"] = span.status.model_copy(update={"description": new_text})
        keys.append("status.description")
    for part in ("events", "links"):
        parts = getattr(span, part)
        new_parts: list[Any] = []
        for each in parts:
            new: dict[str, object] = {}
            name = getattr(each, "name", None)  # of an event
            if names and isinstance(name, str) and (fit := text(name)) is not name:
                new["name"] = fit
                keys.append("events.name")
            if (own := attributes(each.attributes or {})) is not None:
                new["attributes"] = own[0]
                keys += own[1]
            new_parts.append(each.model_copy(update=new) if new else each)
        if any(new is not old for new, old in zip(new_parts, parts, strict=True)):
            changes[part] = new_parts
    if (resource := attributes(span.resource.attributes)) is not None:
        changes["resource"] = span.resource.model_copy(update={"attributes": resource[0]})
        keys += resource[1]
    own = attributes(span.attributes)
    if own is not None:
        keys += own[1]
    if not keys:
        return span
    return span.model_copy(
        update={**changes, "attributes": {**(span.attributes if own is None else own[0]), marker: keys}}
    )
