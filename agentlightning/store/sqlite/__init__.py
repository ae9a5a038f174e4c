"""The store in one SQLite file; see `store.py` for the class and the writing of changes to disk."""

from agentlightning.store.sqlite.store import SQLiteBackend, SQLiteLightningStore

__all__ = ["SQLiteBackend", "SQLiteLightningStore"]
