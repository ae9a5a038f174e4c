"""The store over any backend: runs the rules, wakes waiting callers, and ends attempts that exceed a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore
    from agentlightning.store.rules.tx import Backend
    from agentlightning.types import RetentionPolicy
    from agentlightning.utils.metrics import MetricsBackend

MYPY = False
"""True only for mypy, by its convention. Unlike pyright, mypy does not infer the types of parameters from the
contract, so it reads the operations there."""
if MYPY:

    class EngineStore(LightningStore):
        def __init__(
            self,
            backend: Backend,
            *,
            scan_debounce_seconds: float = 10.0,
            lease_seconds: float = 30.0,
            retention: RetentionPolicy | None = None,
            tracker: MetricsBackend | None = None,
        ) -> None: ...

else:
    from agentlightning.store.engine.store import EngineStore

__all__ = ["EngineStore"]
