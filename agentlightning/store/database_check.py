"""The check of a store in a database, for `agl store check`.

It does not check the structure of the database, which is the server's task. It changes nothing and upgrades no tables.
"""

from __future__ import annotations

from agentlightning.store.rules.durable import FileReport
from agentlightning.store.spec import database_of


def check_database(spec: str) -> FileReport:
    """Decode every record of a store in PostgreSQL or MongoDB.

    Raises:
        ConflictError: a newer program wrote it.
        StoreUnreachableError: the server does not answer.
    """
    if spec.startswith("postgres"):
        from agentlightning.store.postgres.check import check_partition
    else:
        from agentlightning.store.mongo.check import check_partition
    return check_partition(*database_of(spec))
