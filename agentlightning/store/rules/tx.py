"""The storage seam: the record of a rollout, and the primitives over which every rule is written.

A backend executes; it holds no rule. It runs a synchronous *script* against a `Tx`, atomically: either all that the
script saved is there, or the script raised and nothing is. A script must be repeatable (a backend may run it twice):
time, ids and randomness come in as arguments, effects go out through the `Tx` only.
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
"""Gives the n-th identifier of a call: random for a plain call, made from its token for one that carries a token."""


class OwnSpan(Protocol):
    """A span in a form of its backend."""

    sequence_id: int

    def read(self) -> Span:
        """Return the span, with values of its own."""
        ...


SpanBody = bytes | str | OwnSpan
"""A stored span: the JSON that `Span` writes, or what the backend makes of it."""
HEAD: Final = 1000
"""Bytes from the beginning of a stored span that have its number, as a rule."""
Choice = Callable[[Sequence[SpanBody]], Sequence[int]]
"""Chooses spans by their places in a list of all of them, each given whole or by its head."""
Age = Callable[[float], float]
"""Seconds since a wall-clock time, which a jump of the clock does not change."""


def by_wall_clock(now: float) -> Age:
    """Return the age of moments as the difference to `now`."""
    return lambda since: now - since


class Done(NamedTuple):
    """A call that was answered."""

    key: str
    asked: str
    time: float
    answer: str
    """What the call was answered with, or after `!` how it was refused."""


@dataclass(slots=True)
class Record:
    """One rollout: its fields, its attempts, its span counter and its place in the queue.

    The values inside are replaced, never changed in place, so a copy of the record is a private one.
    """

    rollout: Rollout
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    spans_issued: int = 0
    """The largest span number given out or seen."""
    span_count: int = 0
    """Spans that are stored now."""
    span_bytes: int = 0
    """Their encoded size."""
    attempts_dropped: int = 0
    """Spans of the first so many attempts were evicted to keep the store within its bound."""
    queued_at: float | None = None
    """When it entered the queue; None while it is in none."""
    deadline: float | None = None
    """First moment at which the latest attempt may be past a limit."""
    infrastructure_retries: int = 0
    """How often it was queued again because a worker was lost."""
    tokens: tuple[str, ...] = ()
    """Of updates that an earlier version did: one that comes again, late, changes nothing."""
    made_by: str = ""
    """The call that made it: its key and a digest of what it asked for; empty if it had no token."""
    calls: tuple[Done, ...] = ()
    """The calls answered last that changed it, or were refused to; those before are rows (`TokenRow`)."""
    calls_moved: float = 0.0
    """When calls were last moved out of it into rows."""
    reward_numbers: dict[str, int] = field(default_factory=dict[str, int])
    """Number of the span from which each attempt that has a reward has it."""

    def copy(self) -> Record:
        """Return a record that may be changed without touching this one."""
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
        """Return the number of the span from which an attempt has its reward; below all numbers if it has none."""
        return self.reward_numbers.get(attempt.attempt_id, -1)

    @property
    def available_at(self) -> float | None:
        """First moment at which it may be claimed; None while it is in no queue."""
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
        """The worker that has the rollout in hand."""
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
        """Replace the attempt of the same number, or append the next one."""
        if attempt.sequence_id <= len(self.attempts):
            self.attempts[attempt.sequence_id - 1] = attempt
        else:
            self.attempts.append(attempt)


@dataclass(slots=True)
class WorkerRow:
    """A worker; what it has in hand is read from the records (`Tx.held`)."""

    worker: Worker
    unnamed: list[tuple[str, str, float]] = field(default_factory=list[tuple[str, str, float]])
    """Rollout and attempt of each claim that its last heartbeat did not name, and the time up to which it may have been
    named before."""
    beats: str = ""
    """Its last heartbeats, 16 characters each: one that comes again, late, is no sign of life."""


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
    """What a claim with a token was given, nothing perhaps, so that the same token is answered again."""

    claims: list[tuple[str, str]]
    time: float
    renewed: bool = False
    """It is older than its time says, and is kept because a claim of it is still in hand."""
    asked: str = ""
    """Digests of its arguments."""


@dataclass(slots=True)
class TokenRow:
    """What is known of a call with a token beside the records: its key is the key of the call."""

    time: float
    asked: str = ""
    answer: str = ""
    """As in `Done`. Of a call that made rollouts: empty, and some of them were deleted since."""


@dataclass(slots=True)
class RunRow:
    """A run. It is replaced, never changed in place, and each time it is put it stands last among the changes."""

    run: Run
    records: dict[RecordKind, int] = field(default_factory=dict[RecordKind, int])
    """How many records of each kind it has."""
    tokens: tuple[str, ...] = ()
    calls: tuple[Done, ...] = ()
    """As in `Record`."""
    calls_moved: float = 0.0
    """As in `Record`."""


@dataclass(slots=True)
class VocabularyRow:
    """The text of each token id of a tokenizer."""

    tokens: list[str]


class NewRunRecord(NamedTuple):
    """A record of a run on its way into the store."""

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
    """Return what writes and reads a row of a kind in a durable backend.

    Raises:
        KeyError: there is no such kind.
    """
    return TypeAdapter(_ROWS[kind])


@dataclass(slots=True)
class Notes:
    """What a script changed that somebody may be waiting for."""

    queued: list[str | None] = field(default_factory=list[str | None])
    """Run of each rollout that entered the queue and may be claimed at once."""
    delayed: list[str | None] = field(default_factory=list[str | None])
    """Run of each rollout that entered the queue and may be claimed later."""
    finished: list[str] = field(default_factory=list[str])
    """Rollouts that came to an end, or were deleted."""
    ended: list[Rollout] = field(default_factory=list[Rollout])
    """Rollouts that came to an end, as they then were."""
    attempts_ended: list[Attempt] = field(default_factory=list[Attempt])
    """Attempts that came to an end, as they then were."""
    changed: bool = False
    """A rollout changed."""
    damaged: list[str] = field(default_factory=list[str])
    """Rollouts that a reading script passed over because their records cannot be read; they are to be set aside."""


class Tx(Protocol):
    """The primitives. Reads see the writes of the same script."""

    notes: Notes

    def load(self, rollout_id: str) -> Record | None:
        """Return a private copy of a record.

        Raises:
            DamagedRecordError: it cannot be read. Primitives that return several pass over such a one.
        """
        ...

    def save(self, record: Record) -> None:
        """Insert or replace a record; its place in the queue follows `available_at`, its place among the changes is
        the last."""
        ...

    def delete(self, rollout_id: str) -> bool:
        """Remove a record and all its spans; False if it is not there."""
        ...

    def set_aside(self, rollout_id: str) -> None:
        """Take a rollout whose record cannot be read out of the queue and out of every list (see `durable.py`)."""
        ...

    def claim(self, run_id: str | None, now: float) -> Record | None:
        """Return the record of the run to be claimed next, for this script alone: of those that are available at
        `now` the one of highest priority, among equals the one available longest, then the one inserted first."""
        ...

    def next_available(self, run_id: str | None) -> float | None:
        """Return the earliest `available_at` in the queue of a run; None if the queue is empty."""
        ...

    def find(self, plan: Plan) -> Found:
        """Return one page of records. Reading scripts only."""
        ...

    def find_summaries(self, plan: SummaryPlan) -> SummaryPage:
        """Return one page of summaries. Reading scripts only."""
        ...

    def aggregate(self, plan: AggregatePlan) -> RolloutAggregate:
        """Return figures of rollouts in groups. Reading scripts only."""
        ...

    def runs(self) -> list[str | None]:
        """Return the runs that have records."""
        ...

    def counts(self, run_id: tuple[str | None] | None = None) -> Counts:
        """Return the sizes of the store, or of one run (given as a tuple of one)."""
        ...

    def changes(self, after: str, limit: int) -> tuple[list[Record | RunRow], str]:
        """Return records and runs changed after a cursor, each once, the one changed first coming first, and the cursor
        behind the last of them. The cursor "0" is before everything. Reading scripts only.

        Raises:
            BadRequestError: not a cursor of this store.
        """
        ...

    def last_change(self) -> str:
        """Return the cursor behind everything that is there."""
        ...

    def due(self, now: float, limit: int) -> list[Record]:
        """Return records whose deadline is past, the longest past first."""
        ...

    def held(self, worker_id: str, limit: int) -> list[tuple[str, str]]:
        """Return (rollout id, attempt id) of what a worker has in hand, the newest first."""
        ...

    def any_held(self) -> bool:
        """True if some worker has something in hand. For reading scripts."""
        ...

    def add_spans(self, spans: Sequence[Span]) -> list[int]:
        """Store spans; say for each its encoded size in bytes, 0 for one that was there already.

        Raises:
            BusyError: the store is full.
        """
        ...

    def span_bodies(
        self, rollout_id: str, attempt_id: str | None, span_id: str | None = None, choose: Choice | None = None
    ) -> Sequence[SpanBody]:
        """Return the encoded spans of a rollout, of one attempt, or with one span id, in the order in which they were
        stored; with `choose`, those that it chooses, in its order."""
        ...

    # What is done to records of runs is not undone if the script raises later, so it comes after every check.

    def add_run_records(self, run_id: str, records: Sequence[NewRunRecord]) -> list[bool]:
        """Store records of a run; say for each if it was new. One with the kind, step and name of one that is there
        already, or before it in the list, changes nothing.

        Raises:
            BusyError: the store is full; nothing was stored.
        """
        ...

    def find_run_records(self, plan: RecordPlan) -> FoundRecords:
        """Return one page of records, as they were given. Reading scripts only."""
        ...

    def drop_run_records(self, run_id: str, after_step: int) -> int:
        """Remove the records of a run with a greater step; returns how many."""
        ...

    def count_run_records(self, run_id: str) -> dict[RecordKind, tuple[int, int]]:
        """Return for each kind of which a run has records how many, and their greatest step."""
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

    def scan(self, kind: Kind, limit: int | None = None) -> list[tuple[str, Row]]:
        """Return the rows of a kind in the order of first insertion, the first `limit` of them."""
        ...

    def count_rows(self, kind: Kind) -> int:
        """Return how many rows of a kind there are."""
        ...


class Found(NamedTuple):
    """One page of records."""

    records: list[Record]
    total: int
    """How many match."""
    after: Place | None = None
    """The place of the last one, if there are more behind it."""


@dataclass(slots=True)
class Counts:
    """Sizes of a store."""

    rollouts: int = 0
    attempts: int = 0
    spans: int = 0
    span_bytes: int = 0


class Backend(Protocol):
    """Where scripts run and what makes them atomic."""

    shared: bool
    """Other processes may change the same data."""
    persistent: bool

    def execute(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        """Run a script from any thread and wait for it; raise what it raises and leave no trace of it.

        Raises:
            BusyError: too many scripts wait already.
        """
        ...

    async def run(self, script: Callable[[Tx], R], *, write: bool = True) -> tuple[R, Notes]:
        """The same without blocking the event loop for long."""
        ...

    def now(self) -> float:
        """Return wall-clock seconds of the clock that all processes with this data share: the machine's where they are
        on one, that of the database where they are not."""
        ...

    def set_clock(self) -> None:
        """Compare this machine's clock with that of the data; may block for a round trip. Failing changes nothing."""
        ...

    def await_change(self, timeout: float) -> bool:
        """Block for at most `timeout` seconds (from a thread of the caller) until another process may have changed the
        data; False if surely none did. Called on a shared backend only, by one thread at a time."""
        ...

    def close(self) -> None:
        """Release threads, connections and files; may be called twice."""
        ...
