"""Stores for rollouts, attempts, spans, resources and runs. Each class is imported on first use."""

from agentlightning.base.lazy import attach_stub

_REMOVED: dict[str, str] = {
    "CollectionBasedLightningStore": "Implement a `Tx` and a `Backend` instead, see agentlightning/store/rules/tx.py.",
    "LightningCollections": "Implement a `Tx` and a `Backend` instead, see agentlightning/store/rules/tx.py.",
    "RedisLightningStore": "Write a subclass of LightningStore, or use SQLiteLightningStore or PostgresLightningStore.",
}

__getattr__, __dir__ = attach_stub(__name__, _REMOVED)
