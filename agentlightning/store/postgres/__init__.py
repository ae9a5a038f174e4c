"""The store in PostgreSQL; see `store.py` for the class and `tx.py` for what makes it exact."""

from agentlightning.store.postgres.store import PostgresBackend, PostgresLightningStore

__all__ = ["PostgresBackend", "PostgresLightningStore"]
