"""Metrics of one store: how often each operation is called, how long it takes, how it ends. What passes through them is
counted in `meter.py`.

A store without a tracker pays nothing: the operations of an instance are replaced only when it has one.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from agentlightning.store.base import LightningStore
from agentlightning.store.forward import FORWARDED
from agentlightning.store.meter import StoreMeter
from agentlightning.utils.metrics import MetricsBackend

CALLS, CALL_SECONDS = "agl.store.total", "agl.store.latency"
CALL_LABELS = ("method", "store_pubmeth", "status")
"""The operation, the operation that the caller called (another one where one calls the other), `OK` or the class of the
exception."""
SECONDS_BUCKETS = (
    *(1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4),
    *(0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.07),
    *(0.1, 0.2, 0.3, 0.5, 0.7, 1, 2, 3, 5, 7),
    *(10, 12, 15, 20, 25, 30, 40, 50, 60, 90, 120, 180, 240, 300),
)

_called: ContextVar[str | None] = ContextVar("agentlightning_store_operation", default=None)
"""The operation that a caller of the store is in."""


def observe_operations(store: LightningStore, tracker: MetricsBackend) -> StoreMeter:
    """Have every operation of this store counted and timed; return what is to be told of each end.

    The time of an operation includes what it waits for (a long poll, a queue of writers).
    """
    tracker.register_counter(CALLS, CALL_LABELS)
    tracker.register_histogram(CALL_SECONDS, CALL_LABELS, SECONDS_BUCKETS)
    meter = StoreMeter(tracker, SECONDS_BUCKETS)
    for name in FORWARDED:
        setattr(store, name, _observed(name, getattr(store, name), tracker, meter))
    return meter


def _observed(
    name: str, operation: Callable[..., Awaitable[Any]], tracker: MetricsBackend, meter: StoreMeter
) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(operation)
    async def observed(*args: Any, **kwargs: Any) -> Any:
        outer = _called.get()
        entered = _called.set(name) if outer is None else None
        status, start = "OK", time.perf_counter()
        try:
            answer = await operation(*args, **kwargs)
            if outer is None:
                meter.answered(name, answer)
            return answer
        except BaseException as error:
            status = type(error).__name__
            raise
        finally:
            labels = {"method": name, "store_pubmeth": outer or name, "status": status}
            tracker.count(CALLS, 1.0, labels)
            tracker.observe(CALL_SECONDS, time.perf_counter() - start, labels)
            if entered is not None:
                _called.reset(entered)

    return observed
