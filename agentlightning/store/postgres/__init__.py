"""The store in PostgreSQL. The class is in `store.py`; `tx.py` describes how concurrent changes stay consistent."""

import importlib.util

from agentlightning.errors import MissingExtraError

if importlib.util.find_spec("psycopg") is None:
    raise MissingExtraError("PostgreSQL store", "postgres", "psycopg")

from agentlightning.store.postgres.store import PostgresBackend, PostgresLightningStore

__all__ = ["PostgresBackend", "PostgresLightningStore"]
