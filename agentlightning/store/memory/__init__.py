"""The store in memory; see `store.py` for the class and `data.py` for its data."""

from agentlightning.store.memory.store import InMemoryLightningStore, MemoryBackend

__all__ = ["InMemoryLightningStore", "MemoryBackend"]
