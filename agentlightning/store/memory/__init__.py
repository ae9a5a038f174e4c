"""The store in memory. The class is in `store.py`, its data in `data.py`."""

from agentlightning.store.memory.store import InMemoryLightningStore, MemoryBackend

__all__ = ["InMemoryLightningStore", "MemoryBackend"]
