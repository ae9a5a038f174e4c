"""Delivery: the spans of a scope go to the store in one batch, with retries and a deadline; the mirror gets a copy."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import random
import time
from collections.abc import Sequence

from agentlightning.errors import AgentLightningError, BusyError
from agentlightning.store.base import LightningStore
from agentlightning.tracer.mirror import is_mirroring, mirror_spans
from agentlightning.tracer.numbers import Draw
from agentlightning.tracer.scope import Piece, TraceScope
from agentlightning.types import Span
from agentlightning.utils.within import within

logger = logging.getLogger(__name__)

DELIVERY_SECONDS = 30.0
BATCH = 512
"""Spans per request: keeps a request below the store's bound on bodies."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0


class TraceDeliveryError(AgentLightningError, RuntimeError):
    """The spans of an attempt did not reach the store; its evidence is not complete."""


async def deliver(scope: TraceScope, seconds: float = DELIVERY_SECONDS) -> None:
    """Store the spans of a closed scope, in start order, and take over the numbers that the store gave them.

    Repeating it after a failure is safe: the store knows spans by their ids.

    Raises:
        TraceDeliveryError: the store refused them, or did not take them within `seconds`.
    """
    deadline = time.monotonic() + seconds
    pieces = sorted(scope.pieces, key=lambda piece: piece.start_order)
    if not pieces or scope.store is None:
        return
    await _settle_numbers(scope, pieces, deadline)
    _take_numbers(pieces, await deliver_spans(scope.store, [scope.as_span(piece) for piece in pieces], deadline))


async def deliver_spans(store: LightningStore, spans: Sequence[Span], deadline: float) -> list[Span]:
    """Store spans of one attempt by `deadline` (monotonic) and return those that were new, with their numbers.

    Raises:
        TraceDeliveryError: the store refused them, or did not take them in time.
    """
    stored: list[Span] = []
    try:
        for first in range(0, len(spans), BATCH):
            stored += await _store_batch(store, spans[first : first + BATCH], deadline)
    except Exception as error:  # the boundary: whatever the store raises means that evidence is missing
        raise TraceDeliveryError(
            f"{len(spans)} spans of rollout {spans[0].rollout_id}, attempt {spans[0].attempt_id} were not delivered: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        if is_mirroring():
            numbered = {span.span_id: span for span in stored}
            mirror_spans([numbered.get(span.span_id, span) for span in spans])
    return stored


async def _store_batch(store: LightningStore, spans: Sequence[Span], deadline: float) -> list[Span]:
    """Call `add_many_spans`, again after pauses while the store is busy or away, until `deadline` (monotonic)."""
    pause = _FIRST_PAUSE
    while True:
        try:
            return await within(max(deadline - time.monotonic(), 0.01), store.add_many_spans(spans))
        except (OSError, BusyError, asyncio.TimeoutError) as error:
            wait = max(pause, error.retry_after if isinstance(error, BusyError) else 0.0) * random.uniform(0.75, 1.25)
            if time.monotonic() + wait >= deadline:
                raise
            logger.debug("Store did not take %d spans (%s); next try in %.2f s", len(spans), error, wait)
        await asyncio.sleep(wait)
        pause = min(pause * 2, _LONGEST_PAUSE)


async def _settle_numbers(scope: TraceScope, pieces: Sequence[Piece], deadline: float) -> None:
    """Give each reward the number that it drew; one that did not come is drawn by the store at delivery."""
    drawing = [piece for piece in pieces if piece.draw is not None]
    waiting = [_as_awaitable(piece.draw) for piece in drawing if piece.draw is not None]
    if not waiting:
        return
    await asyncio.wait(waiting, timeout=max(deadline - time.monotonic(), 0.01) / 2)
    for piece, future in zip(drawing, waiting, strict=True):
        if future.done() and not future.cancelled() and future.exception() is None:
            scope.as_span(piece).sequence_id = future.result()
        else:
            future.cancel()
            logger.warning(
                "[Rollout %s] a reward got no number when it was emitted; it is ordered behind all calls",
                scope.rollout_id,
            )


def _as_awaitable(draw: Draw) -> asyncio.Future[int]:
    return asyncio.wrap_future(draw) if isinstance(draw, concurrent.futures.Future) else draw


def _take_numbers(pieces: Sequence[Piece], stored: Sequence[Span]) -> None:
    numbered = {span.span_id: span for span in stored}
    for piece in pieces:
        if isinstance(piece.span, Span) and piece.span.span_id in numbered:
            piece.span = numbered[piece.span.span_id]
