"""The store in one SQLite file, durable and without a server. Several processes may use the file at the same time."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from agentlightning.errors import BadRequestError
from agentlightning.store.engine.store import EngineStore
from agentlightning.store.sqlite.backend import SQLiteBackend
from agentlightning.types import RetentionPolicy

if TYPE_CHECKING:
    from agentlightning.utils.metrics import MetricsBackend


class SQLiteLightningStore(EngineStore):
    """A durable store in the file `path`, which is created if it does not exist.

    `synchronous="NORMAL"` is faster and may lose the last changes if the machine (not the process) crashes.
    """

    def __init__(
        self,
        path: str | Path = "agl.db",
        *,
        synchronous: Literal["FULL", "NORMAL"] = "FULL",
        scan_debounce_seconds: float = 10.0,
        lease_seconds: float = 30.0,
        retention: RetentionPolicy | None = None,
        tracker: MetricsBackend | None = None,
    ) -> None:
        if synchronous not in ("FULL", "NORMAL"):
            raise BadRequestError(f"synchronous must be 'FULL' or 'NORMAL'; got {synchronous!r}")
        self.path = str(path)
        engine: dict[str, Any] = {
            "scan_debounce_seconds": scan_debounce_seconds,
            "lease_seconds": lease_seconds,
            "retention": retention,
        }
        self._settings: dict[str, Any] = {"synchronous": synchronous, **engine}
        super().__init__(SQLiteBackend(self.path, synchronous), tracker=tracker, **engine)

    @override
    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the arguments, so that a copy in another process opens the same file."""
        return partial(SQLiteLightningStore, self.path, **self._settings), ()
