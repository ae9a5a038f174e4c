"""The storage interface: the record of a rollout, and the primitives that all rules use.

A backend has no rules. It runs a synchronous *script* against a `Tx`, atomically: either everything that the script
saved is stored, or the script raised and nothing is stored. A script must be repeatable (a backend may run it twice):
time, ids and randomness are arguments, and a script has effects only through the `Tx`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final, Literal, NamedTuple, Protocol, TypeVar, get_args

from pydantic import TypeAdapter

from agentlightning.store.base import RUNNING
from agentlightning.store.cursors import Place
from agentlightning.store.rules.query import FoundRecords, Plan, RecordPlan
from agentlightning.store.summaries.aggregate import AggregatePlan
from agentlightning.store.summaries.plan import SummaryPlan
from agentlightning.types import (
    Attempt,
    RecordKind,
    ResourcesUpdate,
    Rollout,
    RolloutAggregate,
    Run,
    Span,
    SummaryPage,
    Worker,
)

R = TypeVar("R")
Kind = Literal["worker", "resources", "resources_version", "latest_resources", "claim", "token", "run", "vocabulary"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


Ids = Callable[[int], str]
"""Returns the n-th id of a call: derived from its token, or random if the call has none."""


class OwnSpan(Protocol):
    """A span in the form of its backend."""

    sequence_id: int

    def read(self) -> Span:
        """Return the span, with copies of the values."""
        ...


SpanBody = bytes | str | OwnSpan
"""A stored span: the JSON that `Span` writes, or the backend's own form."""
HEAD: Final = 1000
"""Bytes at the beginning of a stored span that usually include its number."""
Choice = Callable[[Sequence[SpanBody]], Sequence[int]]
"""Selects spans from a list of all spans, each complete or only its head; returns their indexes."""
Age = Callable[[float], float]
"""Returns the seconds since a wall-clock time, independent of jumps of the clock."""


def by_wall_clock(now: float) -> Age:
    """Return a function for the age of times, as the difference to `now`."""
    return lambda since: now - since


class Done(NamedTuple):
    """A completed call with its result."""

    key: str
    asked: str
    time: float
    answer: str
    """The result of the call, or `!` and the refusal."""


@dataclass(slots=True)
class Record:
    """One rollout: its fields, its attempts, its span counter and its place in the queue.

    Its values are replaced, never changed in place, so a shallow copy of a record is independent.
    """

    rollout: Rollout
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    spans_issued: int = 0
    """The largest span number issued or received."""
    span_count: int = 0
    """Number of stored spans."""
    span_bytes: int = 0
    """Encoded size of the stored spans in bytes."""
    attempts_dropped: int = 0
    """Number of first attempts with spans that were evicted because the store was full."""
    queued_at: float | None = None
    """Time at which it entered the queue; None while it is not in a queue."""
    deadline: float | None = None
    """Earliest time at which the latest attempt may exceed a limit."""
    infrastructure_retries: int = 0
    """Number of times that it was requeued because a worker was lost."""
    tokens: tuple[str, ...] = ()
    """Tokens of updates by an earlier version, so that a late copy of one changes nothing."""
    made_by: str = ""
    """The call that created it: its key and a digest of its arguments; empty if it had no token."""
    calls: tuple[Done, ...] = ()
    """The latest calls that changed it or were refused; earlier ones are rows (`TokenRow`)."""
    calls_moved: float = 0.0
    """Time at which calls were last moved from the record into rows."""
    reward_numbers: dict[str, int] = field(default_factory=dict[str, int])
    """Number of the span that sets the reward, for each attempt that has one."""

    def copy(self) -> Record:
        """Return a copy that can be changed without an effect on this record."""
        return Record(
            self.rollout,
            list(self.attempts),
            self.spans_issued,
            self.span_count,
            self.span_bytes,
            self.attempts_dropped,
            self.queued_at,
            self.deadline,
            self.infrastructure_retries,
            self.tokens,
            self.made_by,
            self.calls,
            self.calls_moved,
            self.reward_numbers,
        )

    def reward_number(self, attempt: Attempt) -> int:
        """Return the number of the span that set an attempt's reward; a number below all others without a reward."""
        return self.reward_numbers.get(attempt.attempt_id, -1)

    @property
    def available_at(self) -> float | None:
        """Earliest time at which it can be claimed; None while it is not in a queue."""
        if self.queued_at is None:
            return None
        not_before = self.rollout.not_before
        return self.queued_at if not_before is None else max(self.queued_at, not_before)

    @property
    def latest(self) -> Attempt | None:
        """The attempt with the highest number."""
        return self.attempts[-1] if self.attempts else None

    @property
    def holder(self) -> str | None:
        """The worker that runs the rollout."""
        if self.rollout.status in RUNNING and self.attempts:
            return self.attempts[-1].worker_id or None
        return None

    def find_attempt(self, attempt_id: str) -> Attempt | None:
        """Return the attempt with this id, or the latest for the id `latest`."""
        if attempt_id == "latest":
            return self.latest
        for attempt in reversed(self.attempts):
            if attempt.attempt_id == attempt_id:
                return attempt
        return None

    def put_attempt(self, attempt: Attempt) -> None:
        """Replace the attempt with the same number, or append the next one."""
        if attempt.sequence_id <= len(self.attempts):
            self.attempts[attempt.sequence_id - 1] = attempt
        else:
            self.attempts.append(attempt)


@dataclass(slots=True)
class WorkerRow:
    """A worker. Its claims are read from the records (`Tx.held`)."""

    worker: Worker
    unnamed: list[tuple[str, str, float]] = field(default_factory=list[tuple[str, str, float]])
    """Rollout and attempt of each claim that its last heartbeat did not name, and the time until which an earlier one
    may have named it."""
    beats: str = ""
    """Its last heartbeats, 16 characters each, so that a late copy does not count as a heartbeat."""


@dataclass(slots=True)
class ResourcesRow:
    """One version of a set of resources, and the token of the call that published it."""

    update: ResourcesUpdate
    token: str | None = None


@dataclass(slots=True)
class TextRow:
    """A short text, for example the id of the latest resources of a run."""

    value: str


@dataclass(slots=True)
class ClaimRow:
    """The result of a claim with a token, so that the same token gets the same result. It may be empty."""

    claims: list[tuple[str, str]]
    time: float
    renewed: bool = False
    """True if it is older than `time`, and is kept because one of its claims is still pending."""
    asked: str = ""
    """Digests of its arguments."""


@dataclass(slots=True)
class TokenRow:
    """A call with a token that is recorded outside the records. The key of the row is the key of the call."""

    time: float
    asked: str = ""
    answer: str = ""
    """The result, as in `Done`; empty for a call that created rollouts of which some were deleted since."""


@dataclass(slots=True)
class RunRow:
    """A run. It is replaced, never changed in place. Each put makes it the last change of the store."""

    run: Run
    records: dict[RecordKind, int] = field(default_factory=dict[RecordKind, int])
    """Number of records of each kind."""
    tokens: tuple[str, ...] = ()
    calls: tuple[Done, ...] = ()
    """Same as in `Record`."""
    calls_moved: float = 0.0
    """Same as in `Record`."""


@dataclass(slots=True)
class VocabularyRow:
    """The text of each token id of a tokenizer."""

    tokens: list[str]


class NewRunRecord(NamedTuple):
    """A record of a run to store."""

    kind: RecordKind
    step: int
    name: str
    body: bytes
    """The JSON that `RunRecord` writes."""


Row = WorkerRow | ResourcesRow | TextRow | ClaimRow | TokenRow | RunRow | VocabularyRow

_ROWS: Final[dict[Kind, type[Row]]] = {
    "worker": WorkerRow,
    "resources": ResourcesRow,
    "resources_version": ResourcesRow,
    "latest_resources": TextRow,
    "claim": ClaimRow,
    "token": TokenRow,
    "run": RunRow,
    "vocabulary": VocabularyRow,
}


@cache  # made at its first use: all of them take 10 ms, and only a durable backend needs them
def row_type(kind: Kind) -> TypeAdapter[Row]:
    """Return the type adapter that writes and reads a row of a kind in a durable backend.

    Raises:
        KeyError: the kind does not exist.
    """
    return TypeAdapter(_ROWS[kind])


@dataclass(slots=True)
class Notes:
    """Changes of a script for which callers may be waiting."""

    queued: list[str | None] = field(default_factory=list[str | None])
    """Run of each rollout that entered the queue and can be claimed immediately."""
    delayed: list[str | None] = field(default_factory=list[str | None])
    """Run of each rollout that entered the queue and can be claimed later."""
    finished: list[str] = field(default_factory=list[str])
    """Rollouts that ended or were deleted."""
    ended: list[Rollout] = field(default_factory=list[Rollout])
    """Rollouts that ended, in their final state."""
    attempts_ended: list[Attempt] = field(default_factory=list[Attempt])
    """Attempts that ended, in their final state."""
    changed: bool = False
    """True if a rollout changed."""
    damaged: list[str] = field(default_factory=list[str])
    """Rollouts with unreadable records that a read-only script skipped. They must be set aside."""


class Tx(Protocol):
    """The primitives of a script. Reads see the writes of the same script."""

    notes: Notes

    def load(self, rollout_id: str) -> Record | None:
        """Return a private copy of a record.

        Raises:
            DamagedRecordError: the record cannot be read. Primitives that return several records skip it.
        """
        ...

    def save(self, record: Record) -> None:
        """Insert or replace a record. Its place in the queue depends on `available_at`, and it becomes the last
        change of the store."""
        ...

    def delete(self, rollout_id: str) -> bool:
        """Remove a record and all its spans; return False if it does not exist."""
        ...

    def set_aside(self, rollout_id: str) -> None:
        """Remove a rollout with an unreadable record from the queue and from all lists (see `durable.py`)."""
        ...

    def claim(self, run_id: str | None, now: float) -> Record | None:
        """Return the next record of the run to claim, only for this script. Order of the records available at `now`:
        highest priority, longest availability, earliest insertion."""
        ...

    def next_available(self, run_id: str | None) -> float | None:
        """Return the earliest `available_at` in the queue of a run; None if the queue is empty."""
        ...

    def find(self, plan: Plan) -> Found:
        """Return one page of records. Only for read-only scripts."""
        ...

    def find_summaries(self, plan: SummaryPlan) -> SummaryPage:
        """Return one page of summaries. Only for read-only scripts."""
        ...

    def aggregate(self, plan: AggregatePlan) -> RolloutAggregate:
        """Return statistics of rollouts by group. Only for read-only scripts."""
        ...

    def runs(self) -> list[str | None]:
        """Return the runs that have records."""
        ...

    def counts(self, run_id: tuple[str | None] | None = None) -> Counts:
        """Return the counts of the store, or of one run (given as a tuple with one item)."""
        ...

    def changes(self, after: str, limit: int) -> tuple[list[Record | RunRow], str]:
        """Return records and runs changed after a cursor, each once, in the order of their changes, and the cursor
        after the last of them. The cursor "0" is before everything. Only for read-only scripts.

        Raises:
            BadRequestError: the cursor does not belong to this store.
        """
        ...

    def last_change(self) -> str:
        """Return the cursor after all changes so far."""
        ...

    def due(self, now: float, limit: int) -> list[Record]:
        """Return the records with a deadline in the past, earliest deadline first."""
        ...

    def held(self, worker_id: str, limit: int) -> list[tuple[str, str]]:
        """Return (rollout id, attempt id) of each claim of a worker, newest first."""
        ...

    def any_held(self) -> bool:
        """Return True if any worker has a claim. For read-only scripts."""
        ...

    def add_spans(self, spans: Sequence[Span]) -> list[int]:
        """Store spans; return the encoded size in bytes of each one, 0 if it existed already.

        Raises:
            BusyError: the store is full.
        """
        ...

    def span_bodies(
        self, rollout_id: str, attempt_id: str | None, span_id: str | None = None, choose: Choice | None = None
    ) -> Sequence[SpanBody]:
        """Return the encoded spans of a rollout, of one attempt, or with one span id, in the order in which they were
        stored. With `choose`, return the spans that it selects, in its order."""
        ...

    # Changes of records of runs are not undone if the script raises later, so they come after every check.

    def add_run_records(self, run_id: str, records: Sequence[NewRunRecord]) -> list[bool]:
        """Store records of a run; return for each one whether it was new. A record with the kind, step and name of an
        existing record, or of an earlier record in the list, is ignored.

        Raises:
            BusyError: the store is full; nothing was stored.
        """
        ...

    def find_run_records(self, plan: RecordPlan) -> FoundRecords:
        """Return one page of records in their original form. Only for read-only scripts."""
        ...

    def drop_run_records(self, run_id: str, after_step: int) -> int:
        """Remove the records of a run with a greater step; return the number removed."""
        ...

    def count_run_records(self, run_id: str) -> dict[RecordKind, tuple[int, int]]:
        """Return the number of records and the greatest step for each kind of record in a run."""
        ...

    def get(self, kind: Kind, key: str) -> Row | None:
        """Return one row."""
        ...

    def put(self, kind: Kind, key: str, row: Row) -> None:
        """Insert or replace one row."""
        ...

    def drop(self, kind: Kind, key: str) -> None:
        """Remove one row, if it exists."""
        ...

    def scan(self, kind: Kind, limit: int | None = None) -> list[tuple[str, Row]]:
        """Return the first `limit` rows of a kind, in the order of their first insertion."""
        ...

    def count_rows(self, kind: Kind) -> int:
        """Return the number of rows of a kind."""
        ...


class Found(NamedTuple):
    """One page of records."""

    records: list[Record]
    total: int
    """Number of matches."""
    after: Place | None = None
    """The position of the last record, if more records follow."""


@dataclass(slots=True)
class Counts:
    """Counts of a store."""

    rollouts: int = 0
    attempts: int = 0
    spans: int = 0
    span_bytes: int = 0


class Backend(Protocol):
    """The storage of a store, which runs scripts atomically."""

    shared: bool
    """True if other processes can change the same data."""
    persistent: bool

    def execute(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        """Run a script from any thread and wait for it. If it raises, raise that error and store nothing.

        Raises:
            BusyError: too many scripts are waiting.
        """
        ...

    async def run(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        """Run a script. Same as `execute`, without blocking the event loop for long."""
        ...

    def now(self) -> float:
        """Return the wall-clock seconds of the common clock of all processes with this data: the machine's clock if
        they run on one machine, else the clock of the database."""
        ...

    def set_clock(self) -> None:
        """Compare this machine's clock with the clock of the data. May block for a round trip; ignores failures."""
        ...

    def await_change(self, timeout: float) -> bool:
        """Block for at most `timeout` seconds (in the caller's thread) until another process may have changed the data;
        return False if no process did. Called only on a shared backend, by one thread at a time."""
        ...

    def close(self) -> None:
        """Release threads, connections and files. Calling it again does nothing."""
        ...
