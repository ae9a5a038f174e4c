"""The data of a store as they lie there, by its spec: SQL for SQLite and PostgreSQL, collections for MongoDB."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from typing import Any

from agentlightning.store.spec import database_of


def sql(spec: str, statement: str, *values: Any) -> list[Any]:
    """Run a statement with `?` for each value and return its rows; `{}` stands for the prefix of the tables."""
    if spec.startswith("sqlite"):
        path = spec.removeprefix("sqlite:///")
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
            return db.execute(statement.format(""), values).fetchall()
    import psycopg

    with psycopg.connect(database_of(spec)[0], autocommit=True) as db:
        cursor = db.execute(statement.format("agl_").replace("?", "%s").encode(), values)
        return cursor.fetchall() if cursor.description else []


@contextlib.contextmanager
def mongo(spec: str) -> Iterator[tuple[Any, str]]:
    """Yield the database of a store in MongoDB, and its partition."""
    import pymongo

    uri, partition = database_of(spec)
    address, _, name = uri.rpartition("/")
    with pymongo.MongoClient[Any](address) as client:
        yield client[name], partition
