"""The store in PostgreSQL: for a fleet of processes and machines, several stores (partitions) in one database.

Isolation is READ COMMITTED; a script locks the rows that it changes, or checks them at its end (`tx.py`). A few writers
commit many scripts at once (`backend.py`), readers have snapshots. An acknowledged change is on the disk of the server
according to its setting `synchronous_commit` (on, by default). Waiters in other processes are notified of changes by
NOTIFY (`listener.py`). Needs PostgreSQL 13 or later, and connections that keep their session: no pooler in transaction
mode. Each process has up to five connections.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from agentlightning.errors import MissingExtraError
from agentlightning.store.engine.store import EngineStore
from agentlightning.types import RetentionPolicy

if importlib.util.find_spec("psycopg") is None:
    raise MissingExtraError("PostgreSQL store", "postgres", "psycopg")

from agentlightning.store.postgres.backend import PostgresBackend

if TYPE_CHECKING:
    from agentlightning.utils.metrics import MetricsBackend


class PostgresLightningStore(EngineStore):
    """A durable store in a PostgreSQL database; its tables are created if they do not exist.

    `uri` is postgresql://user:password@host:5432/database; `partition` separates stores in one database: two stores
    with the same partition share their data.

    Raises:
        BadRequestError: an argument has a wrong value.
        ConflictError: the tables have a newer version, or the user may not create them.
        StoreUnreachableError: the server does not answer, or rejects the user.
    """

    def __init__(
        self,
        uri: str,
        *,
        partition: str = "default",
        scan_debounce_seconds: float = 10.0,
        lease_seconds: float = 30.0,
        retention: RetentionPolicy | None = None,
        tracker: MetricsBackend | None = None,
    ) -> None:
        self.partition = partition
        self._uri = uri
        engine: dict[str, Any] = {
            "scan_debounce_seconds": scan_debounce_seconds,
            "lease_seconds": lease_seconds,
            "retention": retention,
        }
        self._settings: dict[str, Any] = {"partition": partition, **engine}
        super().__init__(PostgresBackend(uri, partition), tracker=tracker, **engine)

    @override
    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the arguments, so that a copy opens the same partition. The pickle holds the password."""
        return partial(PostgresLightningStore, self._uri, **self._settings), ()


__all__ = ["PostgresBackend", "PostgresLightningStore"]
