"""The store in MongoDB; see `store.py` for the class and `flush.py` for the way in which it stays exact."""

from agentlightning.store.mongo.store import MongoBackend, MongoLightningStore

__all__ = ["MongoBackend", "MongoLightningStore"]
