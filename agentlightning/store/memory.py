"""The store in memory: dictionaries, sorted views, spans as encoded bytes within a bound. Gone with the process.

What it holds is in `memory_data.py`, how a script sees that in `memory_tx.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import override

from agentlightning.errors import BadRequestError
from agentlightning.store.backend import Notes, Tx
from agentlightning.store.base import LightningStoreStatistics
from agentlightning.store.engine import EngineStore
from agentlightning.store.eviction import SpanBudget
from agentlightning.store.memory_data import Data
from agentlightning.store.memory_tx import MemoryTx
from agentlightning.types import RetentionPolicy
from agentlightning.utils.system_snapshot import memory_capacity_bytes

if TYPE_CHECKING:
    from agentlightning.utils.metrics import MetricsBackend

R = TypeVar("R")


class MemoryBackend:
    """Runs scripts inline under one lock, from any thread. Scripts never suspend: microseconds each."""

    shared = False
    persistent = False

    def __init__(self, budget: SpanBudget | None = None) -> None:
        self._lock = threading.Lock()
        self._data = Data(budget or _budget(None, None, None))

    def execute(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        with self._lock:
            tx = MemoryTx(self._data, write=write)
            try:
                result = script(tx)
            except BaseException:
                tx.give_back()
                raise
            if write:
                tx.apply()
            return result, tx.notes

    async def run(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        return self.execute(script, write=write)

    def now(self) -> float:
        return time.time()

    def set_clock(self) -> None:
        """There is one clock."""

    def await_change(self, timeout: float) -> bool:
        """No other process sees this data."""
        return False

    def close(self) -> None:
        """Nothing to release."""


class InMemoryLightningStore(EngineStore):
    """A store that lives in this process; usable from any thread and event loop.

    `max_span_bytes` bounds the encoded spans (a quarter of the machine's memory by default). Beyond it the spans of
    ended rollouts go, read ones first; who asks for them is told (`GoneError`). Spans of rollouts that have not ended
    never go: when they alone fill the bound, `add_span` raises `BusyError`. `eviction_memory_threshold` and
    `safe_memory_threshold` are the same bound and how far eviction goes, in bytes (int) or as a part of the machine's
    memory (float). `thread_safe` is accepted for programs that pass it; the store is always thread-safe.
    """

    def __init__(
        self,
        *,
        thread_safe: bool = True,
        max_span_bytes: int | None = None,
        eviction_memory_threshold: float | None = None,
        safe_memory_threshold: float | None = None,
        scan_debounce_seconds: float = 10.0,
        lease_seconds: float = 30.0,
        retention: RetentionPolicy | None = None,
        tracker: MetricsBackend | None = None,
    ) -> None:
        self._budget = _budget(max_span_bytes, eviction_memory_threshold, safe_memory_threshold)
        super().__init__(
            MemoryBackend(self._budget),
            scan_debounce_seconds=scan_debounce_seconds,
            lease_seconds=lease_seconds,
            retention=retention,
            tracker=tracker,
        )

    @override
    async def statistics(self) -> LightningStoreStatistics:
        return {
            **(await super().statistics()),
            "eviction_threshold_bytes": self._budget.limit,
            "safe_threshold_bytes": self._budget.safe,
            "memory_capacity_bytes": memory_capacity_bytes(),
        }

    @override
    def __reduce__(self) -> str:
        raise TypeError(
            "InMemoryLightningStore lives in one process and cannot be sent to another: "
            "serve it with LightningStoreServer, or use sqlite:///FILE"
        )


_DEFAULT_PART = 0.25
_SAFE_PART = 0.8


def _budget(max_span_bytes: int | None, threshold: float | None, safe: float | None) -> SpanBudget:
    """Return the bound that the arguments describe.

    Raises:
        BadRequestError: a negative size, a part outside 0 to 1, or a safe bound that is not below the other.
    """
    if max_span_bytes is not None and threshold is not None:
        raise BadRequestError("Give max_span_bytes or eviction_memory_threshold, not both; they are the same bound")
    given: Any = threshold if max_span_bytes is None else max_span_bytes
    limit = _bytes("eviction_memory_threshold", _DEFAULT_PART if given is None else given)
    if limit < 1:
        raise BadRequestError(f"eviction_memory_threshold must be at least 1 bytes; got {given!r}")
    kept = int(limit * _SAFE_PART) if safe is None else _bytes("safe_memory_threshold", safe)
    if kept >= limit:
        raise BadRequestError(
            f"safe_memory_threshold must be smaller than eviction_memory_threshold; got {kept} and {limit} bytes"
        )
    return SpanBudget(limit, kept)


def _bytes(name: str, value: float) -> int:
    if isinstance(value, int):
        if value < 0:
            raise BadRequestError(f"{name} must be non-negative; got {value} bytes")
        return value
    if not 0.0 <= value <= 1.0:
        raise BadRequestError(f"{name} ratio must be between 0 and 1; got {value} (an int would be bytes)")
    return int(value * memory_capacity_bytes())
