"""The store in PostgreSQL; see `store.py` for the class and `tx.py` for the way in which it stays exact."""

import importlib.util

from agentlightning.errors import MissingExtraError

if importlib.util.find_spec("psycopg") is None:
    raise MissingExtraError("PostgreSQL store", "postgres", "psycopg")

from agentlightning.store.postgres.store import PostgresBackend, PostgresLightningStore

__all__ = ["PostgresBackend", "PostgresLightningStore"]
