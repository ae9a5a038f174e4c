"""The store in one SQLite file; see `store.py` for the class and `backend.py` for the writing of changes to disk."""

from agentlightning.store.sqlite.backend import SQLiteBackend
from agentlightning.store.sqlite.store import SQLiteLightningStore

__all__ = ["SQLiteBackend", "SQLiteLightningStore"]
