"""Leases on queued rollouts: for a while, no other script receives a rollout that one script claims.

A lease serves speed only: a claim is exact because its rollout is replaced on the number of its last change.
"""

from __future__ import annotations

import contextlib
import time
import uuid

from pymongo import ReturnDocument
from pymongo.errors import PyMongoError
from pymongo.write_concern import WriteConcern

from agentlightning.store.mongo.documents import Document, Key, Partition

LEASE_SECONDS = 10.0
"""Seconds for which a rollout that a script has claimed, or locked for its flush, is withheld from others."""
CLOCKS_DIFFER_SECONDS = 60.0
"""A lease with more seconds left was written by a wrong clock and is ignored."""
_ORDER: Key = [("priority", -1), ("available_at", 1), ("number", 1)]


class Leases:
    """The rollouts that one script has leased from the queues of a partition."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._claimant = uuid.uuid4().hex
        self._leased: list[str] = []

    def take(self, run_id: str | None, now: float) -> Document | None:
        """Return the document of the rollout of the run to be claimed next.

        It leases one at a time: rollouts that are leased but not needed would look like an empty queue to others.
        """
        clock = time.time()
        free = [{"claimed_until": {"$lte": clock}}, {"claimed_until": {"$gt": clock + CLOCKS_DIFFER_SECONDS}}]
        rollouts = self._partition.rollouts.with_options(write_concern=WriteConcern(1))  # a lease may be lost
        document: Document | None = rollouts.find_one_and_update(
            {
                "partition": self._partition.name,
                "run_id": run_id,
                "available_at": {"$gte": 0, "$lte": now},
                "lock": {"$lte": clock},
                "$or": free,
            },
            {"$set": {"claimed_until": clock + LEASE_SECONDS, "claimant": self._claimant}},
            sort=_ORDER,
            return_document=ReturnDocument.AFTER,
        )
        if document is not None:
            self._leased.append(document["_id"])
        return document

    def give_back(self, written: set[str]) -> None:
        """End the leases on documents not in `written` (a write ends a lease). Never fails, since leases expire."""
        unwritten = [document_id for document_id in self._leased if document_id not in written]
        if unwritten:
            with contextlib.suppress(PyMongoError):
                self._partition.rollouts.update_many(
                    {"_id": {"$in": unwritten}, "claimant": self._claimant},
                    {"$set": {"claimed_until": 0.0, "claimant": ""}},
                )


def in_force(until: float) -> bool:
    """Return True while a lease or a lock blocks others."""
    return 0 < until - time.time() < CLOCKS_DIFFER_SECONDS
