"""Stores: where tasks, attempts, spans and resources live. Each is loaded on first use."""

from typing import TYPE_CHECKING, Any

from agentlightning.utils.lazy import lazy_attributes

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore, LightningStoreCapabilities, LightningStoreStatistics
    from agentlightning.store.client_server import LightningStoreClient, LightningStoreServer
    from agentlightning.store.memory import InMemoryLightningStore
    from agentlightning.store.mongo import MongoLightningStore
    from agentlightning.store.postgres import PostgresLightningStore
    from agentlightning.store.spec import store_from_spec
    from agentlightning.store.sqlite import SQLiteLightningStore
    from agentlightning.store.threading import LightningStoreThreaded

_HOMES: dict[str, str] = {
    "InMemoryLightningStore": "agentlightning.store.memory",
    "LightningStore": "agentlightning.store.base",
    "LightningStoreCapabilities": "agentlightning.store.base",
    "LightningStoreClient": "agentlightning.store.client_server",
    "LightningStoreServer": "agentlightning.store.client_server",
    "LightningStoreStatistics": "agentlightning.store.base",
    "LightningStoreThreaded": "agentlightning.store.threading",
    "MongoLightningStore": "agentlightning.store.mongo",
    "PostgresLightningStore": "agentlightning.store.postgres",
    "SQLiteLightningStore": "agentlightning.store.sqlite",
    "store_from_spec": "agentlightning.store.spec",
}

_REMOVED: dict[str, str] = {
    "CollectionBasedLightningStore": "A new backend is a `Tx` and a `Backend`, see agentlightning/store/backend.py.",
    "LightningCollections": "A new backend is a `Tx` and a `Backend`, see agentlightning/store/backend.py.",
    "RedisLightningStore": "Write a subclass of LightningStore, or use SQLiteLightningStore or PostgresLightningStore.",
}

__all__ = [
    "InMemoryLightningStore",
    "LightningStore",
    "LightningStoreCapabilities",
    "LightningStoreClient",
    "LightningStoreServer",
    "LightningStoreStatistics",
    "LightningStoreThreaded",
    "MongoLightningStore",
    "PostgresLightningStore",
    "SQLiteLightningStore",
    "store_from_spec",
]


def __getattr__(name: str) -> Any:
    return lazy_attributes(__name__, _HOMES, name, _REMOVED)
