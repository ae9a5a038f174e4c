"""The store in MongoDB: for a fleet of processes and machines, several stores (partitions) in one database.

No replica set is needed. Each rollout is one document, which is replaced only if it still has the number of its last
change, and a repeated call completes an interrupted one (`flush.py`). An acknowledged change is written with the
concern `majority`: in the journal of a single server, or on most members of a replica set. A single server of MongoDB
8.0 may lose such a change if it is killed; a replica set does not, see https://jira.mongodb.org/browse/SERVER-139311.
Needs MongoDB 4.4 or later and unsharded collections.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from agentlightning.errors import BadRequestError, MissingExtraError
from agentlightning.store.engine import EngineStore
from agentlightning.types import RetentionPolicy

if importlib.util.find_spec("pymongo") is None:
    raise MissingExtraError("MongoDB store", "mongo", "pymongo")

from agentlightning.store.mongo.backend import MongoBackend
from agentlightning.store.mongo.link import DATABASE, DEFAULT_URI, Place
from agentlightning.store.mongo.schema import SPANS

if TYPE_CHECKING:
    from agentlightning.utils.metrics import MetricsBackend


class MongoLightningStore(EngineStore):
    """A durable store in a MongoDB database. The first operation connects, and creates collections and indexes.

    `mongo_uri` is mongodb://user:password@host:27017/database; `database_name` overrides the database in it.
    `partition_id` separates stores in one database: two stores with the same id have the same data. `uri` and
    `database` are aliases of the first two. `collection` is the collection of the spans, `agl_spans` by default; it
    cannot be changed for an existing partition. `mongo_client_kwargs` are passed to `pymongo.MongoClient`. The store is
    always thread-safe.

    Raises:
        BadRequestError: an argument has a wrong value, or an argument and its alias have different values.
        StoreUnreachableError (operations): the server does not respond.
    """

    def __init__(
        self,
        mongo_uri: str | None = None,
        *,
        uri: str | None = None,
        database_name: str | None = None,
        database: str | None = None,
        partition_id: str | None = None,
        mongo_client_kwargs: Mapping[str, Any] | None = None,
        thread_safe: bool = True,
        collection: str | None = None,
        scan_debounce_seconds: float = 10.0,
        lease_seconds: float = 30.0,
        retention: RetentionPolicy | None = None,
        tracker: MetricsBackend | None = None,
    ) -> None:
        if not thread_safe:
            raise BadRequestError("MongoLightningStore is always thread-safe; omit thread_safe")
        address = _one("mongo_uri", mongo_uri, "uri", uri)
        place = Place(address or DEFAULT_URI, mongo_client_kwargs)
        self.database_name = _one("database_name", database_name, "database", database) or place.database or DATABASE
        self.partition_id = "default" if partition_id is None else partition_id
        engine: dict[str, Any] = {
            "scan_debounce_seconds": scan_debounce_seconds,
            "lease_seconds": lease_seconds,
            "retention": retention,
        }
        self._settings: dict[str, Any] = {
            "mongo_uri": address,
            "database_name": self.database_name,
            "partition_id": self.partition_id,
            "mongo_client_kwargs": mongo_client_kwargs,
            "collection": collection,
            **engine,
        }
        spans = SPANS if collection is None else collection
        backend = MongoBackend(place, self.database_name, self.partition_id, spans)
        super().__init__(backend, tracker=tracker, **engine)

    def connect(self) -> None:
        """Connect now instead of with the first operation; blocks. If the connection fails, the store is closed.

        Raises:
            StoreUnreachableError: the server does not respond.
        """
        try:
            self._runtime.backend.execute(lambda _: None, write=False)
        except BaseException:
            self._runtime.backend.close()
            raise

    @override
    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the arguments, so that a copy opens the same partition. The pickle contains the password."""
        return partial(MongoLightningStore, **self._settings), ()


def _one(name: str, value: str | None, other_name: str, other: str | None) -> str | None:
    """Return the value of an argument with an alias.

    Raises:
        BadRequestError: both names have different values.
    """
    if value is not None and other is not None and value != other:
        raise BadRequestError(f"{other_name} is an alias of {name}; pass one of them")
    return other if value is None else value


__all__ = ["MongoBackend", "MongoLightningStore"]
