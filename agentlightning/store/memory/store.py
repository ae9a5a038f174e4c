"""The store in memory: dictionaries, sorted views, spans as encoded bytes within a bound. Gone with the process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from agentlightning.store.base import LightningStoreStatistics
from agentlightning.store.engine.store import EngineStore
from agentlightning.store.memory.backend import MemoryBackend
from agentlightning.store.memory.eviction import span_budget
from agentlightning.types import RetentionPolicy
from agentlightning.utils.system_snapshot import memory_capacity_bytes

if TYPE_CHECKING:
    from agentlightning.utils.metrics import MetricsBackend


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
        self._budget = span_budget(max_span_bytes, eviction_memory_threshold, safe_memory_threshold)
        super().__init__(
            MemoryBackend(self._budget), scan_debounce_seconds=scan_debounce_seconds, lease_seconds=lease_seconds,
            retention=retention, tracker=tracker,
        )  # fmt: skip

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
