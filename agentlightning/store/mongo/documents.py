"""The documents of a partition in MongoDB.

A rollout is one document: its JSON in `body`, the fields for searching, sorting and summaries, and two fields for exact
changes: `change` (the number of its last change, which a writer must name to replace it) and `recent` (the numbers of
its last changes; spans have the number of the change that counts them). `claimed_until` is the lease of a claim, `lock`
is the lease of a flush that changes several documents. A span is one document, and so is a row.
"""

from __future__ import annotations

import time
from typing import Any

from pymongo.errors import BulkWriteError

from agentlightning.errors import TooLargeError
from agentlightning.store.rules.durable import INDEXED, indexed, record_type
from agentlightning.store.rules.query import sortable_fields
from agentlightning.store.rules.tx import Record
from agentlightning.store.summaries.facts import facts_of, input_text, preview_of, searched
from agentlightning.types import Rollout

Document = dict[str, Any]
RECENT = 32
"""Number of last changes in `recent`."""
MAX_BODY = 16 * 1024 * 1024 - 64 * 1024
"""Largest body in bytes. A document can have 16 MiB, including its other fields."""
LEASE_SECONDS = 10.0
"""Seconds for which others cannot claim or change a rollout that a script has claimed or locked for its flush."""
CLOCKS_DIFFER_SECONDS = 60.0
"""Largest number of seconds left of a lease. A longer lease was written with a wrong clock and is ignored."""
_DUPLICATE = 11000


class LostRace(Exception):
    """Raised if another writer changed data that the script read. The script is run again."""


def record_fields(record: Record) -> Document:
    """Return the fields of a rollout's document, without its id and its numbers.

    Raises:
        TooLargeError: the record is larger than a document may be.
    """
    rollout = record.rollout
    body = fitting(record_type().dump_json(record), f"Rollout {rollout.rollout_id} (input, metadata and attempts)")
    return {
        **dict(zip(INDEXED, indexed(record), strict=True)),
        **{name: getattr(rollout, name) for name in sortable_fields(Rollout)},  # without an end, `end_time` is null
        "attempt_id": record.latest.attempt_id if record.latest else None,
        "claimed_until": 0.0,
        "claimant": "",
        "lock": 0.0,
        **summary_fields(record),
        "body": body,
    }


def summary_fields(record: Record) -> Document:
    """Return the fields of a rollout's document for its summary."""
    text = input_text(record.rollout.input)
    facts = facts_of(record.rollout, record.latest, len(record.attempts))
    return {"facts": list(facts), "preview": preview_of(text), "searched": searched(text)}


def fitting(body: bytes, what: str) -> str:
    """Return a body as text.

    Raises:
        TooLargeError: the body is larger than a document may be.
    """
    if len(body) > MAX_BODY:
        raise TooLargeError(
            f"{what} takes {len(body)} bytes; the limit for a MongoDB document is {MAX_BODY}. "
            "Make it smaller, or keep the large part elsewhere and store its location."
        )
    return body.decode()


def counts(rollout: Document | None, tag: int) -> bool:
    """Return True if a rollout counts its spans with this number, so that they are committed."""
    if rollout is None:
        return True
    recent = rollout["recent"]
    return tag in recent or tag < (recent[0] if len(recent) == RECENT else 1)


def in_force(until: float) -> bool:
    """Return True while a lease or a lock blocks others."""
    return 0 < until - time.time() < CLOCKS_DIFFER_SECONDS


def only_duplicates(error: BulkWriteError) -> bool:
    """Return True if the only failures are insertions of existing documents."""
    failures = [*error.details["writeErrors"], *error.details["writeConcernErrors"]]
    return all(failure["code"] == _DUPLICATE for failure in failures)
