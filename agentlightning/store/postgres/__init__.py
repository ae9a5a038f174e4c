"""The store in PostgreSQL; see `store.py` for the class and `tx.py` for the way in which it stays exact."""

from agentlightning.store.postgres.store import PostgresBackend, PostgresLightningStore

__all__ = ["PostgresBackend", "PostgresLightningStore"]
