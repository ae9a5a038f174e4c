"""Runs scripts over what is held in memory (`data.py`), which they see through `tx.py`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from agentlightning.store.memory.data import Data
from agentlightning.store.memory.eviction import SpanBudget, span_budget
from agentlightning.store.memory.tx import MemoryTx
from agentlightning.store.rules.tx import Notes, Tx

R = TypeVar("R")


class MemoryBackend:
    """Runs scripts inline under one lock, from any thread. Scripts never suspend: microseconds each."""

    shared = False
    persistent = False

    def __init__(self, budget: SpanBudget | None = None) -> None:
        self._lock = threading.Lock()
        self._data = Data(budget or span_budget())

    def execute(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        with self._lock, MemoryTx(self._data, write=write) as tx:
            return script(tx), tx.notes

    async def run(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        with self._lock, MemoryTx(self._data, write=write) as tx:
            return script(tx), tx.notes

    def now(self) -> float:
        return time.time()

    def set_clock(self) -> None:
        """There is one clock."""

    def await_change(self, timeout: float) -> bool:
        """No other process sees this data."""
        return False

    def close(self) -> None:
        """Nothing to release."""
