"""The schema version of a MongoDB database, and the upgrade of a database of an earlier version.

Without a transaction, an upgrade consists of steps that may be done twice, even when they are already done.
One process at a time does them, under a lease in the document `schema`. It first writes the new version there, with
the old one beside it, so that programs that know only the old one can no longer open the database. Then it writes the
version into the counter of each partition, from which every flush allocates, so that open programs can no longer write.
Then it does the steps and removes the old version. After a crash, the next process that opens the database continues.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable
from typing import Any

from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import DuplicateKeyError

from agentlightning.errors import BusyError
from agentlightning.store.mongo.summaries import upgrade
from agentlightning.store.rules.durable import SCHEMA_VERSION, check_not_newer

Document = dict[str, Any]
LEASE_SECONDS = 60.0
"""Seconds that others wait for the process that upgrades."""
_LOOK_SECONDS = 0.05
_SETTLE_SECONDS = 1.0
"""Seconds after which a flush with numbers from before the counters were marked has written or allocated others."""

STEPS: list[tuple[int, Callable[[Database[Document]], None]]] = [
    (3, lambda database: None),
    (4, lambda database: None),
    (5, upgrade),
]
"""The upgrade step to each version: repeatable, and harmless where it is already done."""


def prepare(database: Database[Document], counters: Collection[Document], counter: Document) -> None:
    """Upgrade a database and record its version in the counter of a partition, which is created if it does not exist.
    Any number of processes may do so at the same time.

    Raises:
        ConflictError: a newer version wrote the database.
        BusyError: another process has been upgrading it for long.
    """
    with contextlib.suppress(DuplicateKeyError):
        counters.insert_one({"_id": "schema", "version": SCHEMA_VERSION})
    check_version(counters)
    with contextlib.suppress(DuplicateKeyError):
        counters.insert_one(counter)
    mark = {"_id": counter["_id"], "$or": [{"schema": {"$exists": False}}, {"schema": {"$lt": SCHEMA_VERSION}}]}
    counters.update_one(mark, {"$set": {"schema": SCHEMA_VERSION}})
    end = time.monotonic() + 2 * LEASE_SECONDS
    while True:
        state = check_version(counters)
        if "from" not in state and state["version"] == SCHEMA_VERSION:
            return
        if state.get("lease", 0.0) <= time.time():
            _upgrade(database, counters, state)
        elif time.monotonic() > end:
            raise BusyError(
                f"The MongoDB database {database.name!r} is being upgraded to schema version {state['version']} by "
                "another process; try again later"
            )
        else:
            time.sleep(_LOOK_SECONDS)


def check_version(counters: Collection[Document]) -> Document:
    """Return the document that holds the version.

    Raises:
        ConflictError: the version is newer.
    """
    document = counters.find_one({"_id": "schema"}) or {"version": SCHEMA_VERSION}
    check_not_newer(f"in the MongoDB database {counters.database.name!r}", document["version"])
    return document


def _upgrade(database: Database[Document], counters: Collection[Document], state: Document) -> None:
    """Take the lease, unless another process is faster, and do the remaining steps."""
    begun, owner = state.get("from", state["version"]), uuid.uuid4().hex
    lease = {"version": SCHEMA_VERSION, "from": begun, "lease": time.time() + LEASE_SECONDS, "owner": owner}
    if not counters.update_one(state, {"$set": lease}).matched_count:
        return
    older = {"_id": {"$ne": "schema"}, "$or": [{"schema": {"$exists": False}}, {"schema": {"$lt": SCHEMA_VERSION}}]}
    counters.update_many(older, {"$set": {"schema": SCHEMA_VERSION}})
    time.sleep(_SETTLE_SECONDS)
    for number, step in STEPS:
        if number > begun:
            step(database)
    done = {"from": "", "lease": "", "owner": ""}
    counters.update_one({"_id": "schema", "owner": owner}, {"$unset": done})
