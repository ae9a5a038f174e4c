"""Stores for tasks, attempts, spans and resources. Each class is loaded on first use."""

from agentlightning.base.lazy import attach_stub

_REMOVED: dict[str, str] = {
    "CollectionBasedLightningStore": "A new backend is a `Tx` and a `Backend`, see agentlightning/store/rules/tx.py.",
    "LightningCollections": "A new backend is a `Tx` and a `Backend`, see agentlightning/store/rules/tx.py.",
    "RedisLightningStore": "Write a subclass of LightningStore, or use SQLiteLightningStore or PostgresLightningStore.",
}

__getattr__, __dir__ = attach_stub(__name__, _REMOVED)
