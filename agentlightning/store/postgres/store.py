"""The store in PostgreSQL: for a fleet of processes and machines, several stores (partitions) in one database.

Isolation is READ COMMITTED; what a script changes it locks, or checks when it is done (`tx.py`). A few writers commit
many scripts at once (`writer.py`), readers have snapshots. An acknowledged change is on the disk of the server as its
setting `synchronous_commit` promises (on, by default). Waiters in other processes hear of changes by NOTIFY
(`listener.py`). Needs PostgreSQL 13 or newer, and connections that keep their session: no pooler in transaction mode in
between. Each process has up to five connections.
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
    """A durable store in a PostgreSQL database; its tables are made if they are not there.

    `uri` is postgresql://user:password@host:5432/database; `partition` tells stores in one database apart: two stores
    share their data if they have the same.

    Raises:
        BadRequestError: an argument has a wrong value.
        ConflictError: the tables are of a newer version, or may not be made.
        StoreUnreachableError: the server does not answer, or does not let the user in.
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
        """A copy in another process opens the same partition. What is pickled holds the password."""
        return partial(PostgresLightningStore, self._uri, **self._settings), ()


__all__ = ["PostgresBackend", "PostgresLightningStore"]
