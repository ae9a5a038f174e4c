"""The store in one SQLite file. The class is in `store.py`."""

from agentlightning.store.sqlite.store import SQLiteBackend, SQLiteLightningStore

__all__ = ["SQLiteBackend", "SQLiteLightningStore"]
