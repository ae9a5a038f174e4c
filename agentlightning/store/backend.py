"""The storage seam: the record of a rollout, and the primitives over which every rule is written.

A backend executes; it holds no rule. It runs a synchronous *script* against a `Tx`, atomically: either all that the
script saved is there, or the script raised and nothing is. A script must be repeatable (a backend may run it twice):
time, ids and randomness come in as arguments, effects go out through the `Tx` only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from pydantic import TypeAdapter

from agentlightning.store.base import FINISHED, QUEUING, RUNNING
from agentlightning.store.query import Plan
from agentlightning.types import Attempt, ResourcesUpdate, Rollout, Span, Worker

R = TypeVar("R")
Kind = Literal["worker", "resources", "resources_version", "latest_resources", "claim"]


@dataclass(slots=True)
class Record:
    """One rollout: its fields, its attempts, its span counter and its place in the queue.

    The values inside are replaced, never changed in place, so a copy of the record is a private one.
    """

    rollout: Rollout
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    spans_issued: int = 0
    """The largest span number given out or seen."""
    queued_at: float | None = None
    """When it entered the queue; None while it is in none."""
    deadline: float | None = None
    """First moment at which the latest attempt may be past a limit."""
    infrastructure_retries: int = 0
    """How often it was queued again because a worker was lost."""

    def copy(self) -> Record:
        """Return a record that may be changed without touching this one."""
        return Record(
            self.rollout,
            list(self.attempts),
            self.spans_issued,
            self.queued_at,
            self.deadline,
            self.infrastructure_retries,
        )

    @property
    def latest(self) -> Attempt | None:
        """The attempt with the highest number."""
        return self.attempts[-1] if self.attempts else None

    @property
    def holder(self) -> str | None:
        """The worker that has the rollout in hand."""
        attempt = self.latest
        if attempt is None or self.rollout.status not in RUNNING:
            return None
        return attempt.worker_id or None

    def find_attempt(self, attempt_id: str) -> Attempt | None:
        """Return the attempt with this id, or the latest for the id `latest`."""
        if attempt_id == "latest":
            return self.latest
        for attempt in reversed(self.attempts):
            if attempt.attempt_id == attempt_id:
                return attempt
        return None

    def put_attempt(self, attempt: Attempt) -> None:
        """Replace the attempt of the same number, or append the next one."""
        if attempt.sequence_id <= len(self.attempts):
            self.attempts[attempt.sequence_id - 1] = attempt
        else:
            self.attempts.append(attempt)


@dataclass(slots=True)
class WorkerRow:
    """A worker; what it has in hand is read from the records (`Tx.held`)."""

    worker: Worker


@dataclass(slots=True)
class ResourcesRow:
    """One version of a set of resources, and the token of the call that published it."""

    update: ResourcesUpdate
    token: str | None = None


@dataclass(slots=True)
class TextRow:
    """A pointer to something else, for example the id of the latest resources of a run."""

    value: str


@dataclass(slots=True)
class ClaimRow:
    """What a claim with a token was given, so that the same token is answered again."""

    claims: list[tuple[str, str]]
    time: float


Row = WorkerRow | ResourcesRow | TextRow | ClaimRow

ROW_TYPES: dict[Kind, TypeAdapter[Row]] = {
    "worker": TypeAdapter(WorkerRow),
    "resources": TypeAdapter(ResourcesRow),
    "resources_version": TypeAdapter(ResourcesRow),
    "latest_resources": TypeAdapter(TextRow),
    "claim": TypeAdapter(ClaimRow),
}
"""How a durable backend writes a row of each kind."""


@dataclass(slots=True)
class Notes:
    """What a script changed that somebody may be waiting for."""

    queued: list[str | None] = field(default_factory=list[str | None])
    """Run of each rollout that entered the queue."""
    finished: list[str] = field(default_factory=list[str])
    """Rollouts that came to an end."""


class Tx(Protocol):
    """The primitives. Reads see the writes of the same script."""

    notes: Notes

    def load(self, rollout_id: str) -> Record | None:
        """Return a private copy of a record."""
        ...

    def save(self, record: Record) -> None:
        """Insert or replace a record; its place in the queue follows `queued_at`."""
        ...

    def claim(self, run_id: str | None) -> Record | None:
        """Return the record of the run that has waited longest, for this script alone."""
        ...

    def find(self, plan: Plan) -> tuple[list[Record], int]:
        """Return one page of records and the number of matches."""
        ...

    def due(self, now: float, limit: int) -> list[Record]:
        """Return records whose deadline is past."""
        ...

    def held(self, worker_id: str, limit: int) -> list[tuple[str, str]]:
        """Return (rollout id, attempt id) of what a worker has in hand, the newest first."""
        ...

    def add_spans(self, spans: Sequence[Span]) -> list[bool]:
        """Store spans; say for each whether it was new."""
        ...

    def spans(self, rollout_id: str, attempt_id: str | None) -> list[Span]:
        """Return spans in the order in which they were stored.

        Raises:
            GoneError: they were evicted.
        """
        ...

    def get(self, kind: Kind, key: str) -> Row | None:
        """Return one row."""
        ...

    def put(self, kind: Kind, key: str, row: Row) -> None:
        """Insert or replace one row."""
        ...

    def drop(self, kind: Kind, key: str) -> None:
        """Remove one row if it is there."""
        ...

    def scan(self, kind: Kind) -> list[tuple[str, Row]]:
        """Return all rows of a kind in the order of first insertion."""
        ...


@dataclass(slots=True)
class Counts:
    """Sizes of a store."""

    rollouts: int
    attempts: int
    spans: int
    span_bytes: int


class Backend(Protocol):
    """Where scripts run and what makes them atomic."""

    shared: bool
    """Other processes may change the same data."""
    persistent: bool

    def execute(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        """Run a script from any thread and wait for it; raise what it raises and leave no trace of it."""
        ...

    async def run(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        """The same without blocking the event loop."""
        ...

    def counts(self) -> Counts:
        """Return the sizes."""
        ...

    def close(self) -> None:
        """Release threads and files; may be called twice."""
        ...


def note_change(tx: Tx, record: Record, before: str | None) -> None:
    """Save a record and note for waiters what its status became."""
    tx.save(record)
    status = record.rollout.status
    if status != before:
        if status in QUEUING:
            tx.notes.queued.append(record.rollout.run_id)
        elif status in FINISHED:
            tx.notes.finished.append(record.rollout.rollout_id)
