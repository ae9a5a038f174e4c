"""LightningStore: the contract of every store. Implementations document only what differs.

Every operation is a coroutine, safe to repeat where it says so, and raises the classes of `agentlightning.errors`:
`NotFoundError` for acting on an unknown id, `ConflictError` for a change that the present state forbids,
`BadRequestError` for a wrong value. Getters answer None for an unknown id. Times are wall-clock seconds. A method is
declared here once, with what `@Operation` (`operations.py`) says of it: server, client and wrappers are read from that.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Literal

from opentelemetry.sdk.trace import ReadableSpan
from typing_extensions import TypedDict

from agentlightning.errors import NotFoundError
from agentlightning.store.operations import UNSET, Operation, Unset
from agentlightning.store.traces import Traces
from agentlightning.types import (
    AggregateBy,
    Attempt,
    AttemptedRollout,
    AttemptError,
    BestFigure,
    EnqueueRolloutRequest,
    EventPage,
    FilterOptions,
    HistoryImport,
    NamedResources,
    Outcome,
    PaginatedResult,
    RecordKind,
    ResourcesUpdate,
    Rollout,
    RolloutAggregate,
    RolloutConfig,
    RolloutFilter,
    RolloutStatus,
    Run,
    RunRecord,
    RunState,
    Span,
    SpanOutline,
    SummaryPage,
    TaskInput,
    TokenText,
    Worker,
)
from agentlightning.types.core import AnyAttemptStatus, AnyRolloutStatus, AnyWorkerStatus
from agentlightning.types.mode import AnyMode
from agentlightning.types.summaries import AnySummarySort

FilterLogic = Literal["and", "or"]
SortOrder = Literal["asc", "desc"]

QUEUING: Final[frozenset[RolloutStatus]] = frozenset(("queuing", "requeuing"))
RUNNING: Final[frozenset[RolloutStatus]] = frozenset(("preparing", "running"))
FINISHED: Final[frozenset[RolloutStatus]] = frozenset(("failed", "succeeded", "cancelled"))


def is_queuing(rollout: Rollout) -> bool:
    """True if the rollout waits for a worker."""
    return rollout.status in QUEUING


def is_running(rollout: Rollout) -> bool:
    """True if a worker has the rollout in hand."""
    return rollout.status in RUNNING


def is_finished(rollout: Rollout) -> bool:
    """True if the rollout is at an end."""
    return rollout.status in FINISHED


class RequestToken(str):
    """Token of one request, whose calls of one operation are numbered.

    Whoever serves the request may make several: a store that overrides one form of an operation, a claim that is asked
    again. With one token the second would be answered as the first was. A repeated request numbers them alike.
    """

    def __init__(self, _: str) -> None:
        self._calls: Counter[str] = Counter()

    def of_call(self, operation: str) -> str:
        """Return the token of the next call of an operation: this one, then others that are made from it."""
        number = self._calls[operation]
        self._calls[operation] += 1
        return f"{self}/{number}" if number else str(self)


request_token: ContextVar[str | None] = ContextVar("agentlightning_request_token", default=None)
"""Idempotency token of the call under way. Ids of what the call creates are made from it, so a call that is
repeated with the same token is answered again, not done again. A `RequestToken` stands for several calls."""


def call_token(operation: str) -> str | None:
    """Return the token of the call of an operation that begins now, if it has one. Once for each call."""
    token = request_token.get()
    return token.of_call(operation) if isinstance(token, RequestToken) else token


class LightningStoreCapabilities(TypedDict, total=False):
    """What a store can do; an absent key means no."""

    async_safe: bool
    """May be called by concurrent coroutines."""
    thread_safe: bool
    """May be called from concurrent threads."""
    zero_copy: bool
    """All processes that hold it see the same data."""
    otlp_traces: bool
    """Offers an OTLP/HTTP end point."""
    distributed: bool
    """Data is shared across processes or machines."""
    persistent: bool
    """Data outlives the process."""
    persistence: bool
    """The same as `persistent`."""


class LightningStoreStatistics(TypedDict, total=False):
    """Counters of a store."""

    name: str
    """The class of the store."""
    total_rollouts: int
    """Rollouts that it keeps, whatever their status."""
    total_attempts: int
    """Attempts of these rollouts."""
    total_spans: int
    """Spans of these attempts."""
    total_resources: int
    """Sets of resources, each counted once."""
    total_workers: int
    """Workers that it knows."""
    uptime: float
    """Seconds since the store was made."""
    total_span_bytes: int
    """Bytes that the spans take."""
    eviction_threshold_bytes: int
    """Bytes of spans that the store in memory never exceeds; it drops those of ended rollouts."""
    safe_threshold_bytes: int
    """Bytes of spans that are left when it has dropped some."""
    memory_capacity_bytes: int
    """Bytes of memory that this process may use."""
    lease_seconds: float
    """A worker that is silent for so long loses the rollouts that it has claimed."""
    retention: dict[str, float]
    """What is set of the `RetentionPolicy`; not there if everything is kept."""


_ELSEWHERE: Final[dict[str, str]] = {
    "collections": (
        "each operation is a transaction of its own, such as await store.update_resources(resources_id, resources); "
        "rules and storage meet in `Backend` and `Tx` (agentlightning/store/rules/tx.py)"
    ),
    "cancel_rollout": "call update_rollout(rollout_id, status='cancelled')",
}
"""Names that programs try, and what does it here."""

recording: set[asyncio.Task[None]] = set()
"""Metrics on their way to the store, see `record_metric`."""


class LightningStore:
    """Where tasks, attempts, spans, resources, workers and runs meet."""

    if TYPE_CHECKING:

        @property
        def traces(self) -> Traces:
            """The spans of all rollouts: `await store.traces.get_all()`."""
            ...

    else:  # no property, so that a store of a user's may have an attribute of this name

        def __getattr__(self, name: str) -> Any:
            if name == "traces":
                return Traces(self)
            hint = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        """What this store can do; nothing by default."""
        return {"async_safe": False, "thread_safe": False, "zero_copy": False, "otlp_traces": False}

    def otlp_traces_endpoint(self) -> str:
        """Return the URL that accepts OTLP traces (ends in /v1/traces).

        Raises:
            NotImplementedError: the store has none.
        """
        raise NotImplementedError(f"{type(self).__name__} has no OTLP endpoint; spans go in by add_many_spans")

    async def close(self) -> None:
        """Release connections, files and threads. May be called twice."""

    @Operation("GET /statistics", slow=True)
    async def statistics(self) -> LightningStoreStatistics:
        """Return the counters."""
        return {"name": type(self).__name__}

    # --- work comes in ----------------------------------------------------------------------------------------------

    @Operation("POST /rollouts", status=201, retry="token", whole=True)
    async def start_rollout(
        self,
        input: TaskInput,
        mode: AnyMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        worker_id: str | None = None,
        *,
        run_id: str | None = None,
    ) -> AttemptedRollout:
        """Create a rollout with its first attempt in hand (status `preparing`); it is never queued.

        `resources_id=None` takes the latest resources of the run, pinned at their version.
        """
        raise NotImplementedError

    @Operation(many="enqueue_many_rollouts")
    async def enqueue_rollout(
        self,
        input: TaskInput,
        mode: AnyMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        *,
        run_id: str | None = None,
        priority: int = 0,
        not_before: float | None = None,
    ) -> Rollout:
        """Create a rollout and put it into the queue of its run.

        Of what may be claimed, the highest `priority` goes first, then what could be claimed longest. Nobody claims it
        before `not_before` (wall-clock seconds).

        Raises:
            TypeError: `input` holds something that is no JSON value; names the place.
        """
        raise NotImplementedError

    @Operation("POST /queues/rollouts/enqueue", status=201, retry="token", whole=True)
    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
        """Enqueue a batch, all or nothing, in order. An empty batch gives an empty list."""
        raise NotImplementedError

    @Operation(many="dequeue_many_rollouts")
    async def dequeue_rollout(
        self, worker_id: str | None = None, *, timeout: float = 0.0, run_id: str | None = None
    ) -> AttemptedRollout | None:
        """Claim the next queued rollout of the run, with a new attempt; None if there is none.

        Waits up to `timeout` seconds for one to arrive. A claim is a lease: a worker that has sent heartbeats and then
        falls silent loses it.
        """
        raise NotImplementedError

    @Operation("POST /queues/rollouts/dequeue", retry="token", whole=True)
    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None, timeout: float = 0.0, run_id: str | None = None
    ) -> list[AttemptedRollout]:
        """Claim up to `limit` rollouts, oldest first; waits up to `timeout` seconds for the first of them."""
        raise NotImplementedError

    @Operation(
        "POST /rollouts/{rollout_id}/attempts",
        also=("POST /rollouts/{rollout_id}/attempt", "POST /rollouts/{rollout_id}/start"),
        status=201,
        retry="token",
        whole=True,
    )
    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        """Begin a further attempt whatever the rollout's status; the one way out of a terminal status besides queuing.

        Raises:
            NotFoundError: no such rollout.
        """
        raise NotImplementedError

    # --- evidence comes in ------------------------------------------------------------------------------------------

    @Operation("POST /spans", body="span", status=201, many="add_many_spans")
    async def add_span(self, span: Span) -> Span | None:
        """Store one span; None if its (rollout, attempt, span id) is there already.

        A span is a sign of life: it starts a `preparing` attempt and revives an `unresponsive` one. One that arrives
        for an attempt that is no longer the latest is kept and marked `agentlightning.stale`.

        Raises:
            NotFoundError: no such rollout or attempt.
        """
        raise NotImplementedError

    @Operation("POST /spans/batch", status=201)
    async def add_many_spans(self, spans: Sequence[Span]) -> list[Span]:
        """Store spans in one step and return those that were new, in the order given.

        A span with `sequence_id` below 0 is given the next number of its rollout. Who repeats the call because the
        reply was lost may be told that there was nothing new.

        Raises:
            NotFoundError: a rollout or attempt is unknown; then nothing is stored.
        """
        raise NotImplementedError

    @Operation(kind="default")
    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: ReadableSpan, sequence_id: int | None = None
    ) -> Span | None:
        """Convert an ended OpenTelemetry span, store it and return what is stored, also where it was there already.

        It is numbered by the store when `sequence_id` is None. A request that is repeated because its reply was lost
        has the same answer.
        """
        number = -1 if sequence_id is None else sequence_id
        span = Span.from_opentelemetry(readable_span, rollout_id, attempt_id, number)
        return await self.add_span(span) or await self.get_span(rollout_id, attempt_id, span.span_id)

    @Operation("POST /spans/next", wrap="sequence_id", many="get_many_span_sequence_ids")
    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """Return the next number of the rollout, 1 first. Numbers never repeat; attempts of a rollout share them.

        Raises:
            NotFoundError: no such rollout.
        """
        raise NotImplementedError

    @Operation("POST /spans/next/batch", wrap="sequence_ids")
    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> list[int]:
        """Return one number per (rollout, attempt) pair, in the order given."""
        raise NotImplementedError

    # --- changes ----------------------------------------------------------------------------------------------------

    @Operation("POST /rollouts/{rollout_id}", retry="token", never_null=("status", "config"))
    async def update_rollout(
        self,
        rollout_id: str,
        input: TaskInput | Unset = UNSET,
        mode: AnyMode | Unset | None = UNSET,
        resources_id: str | Unset | None = UNSET,
        status: AnyRolloutStatus | Unset = UNSET,
        config: RolloutConfig | Unset = UNSET,
        metadata: dict[str, Any] | Unset | None = UNSET,
    ) -> Rollout:
        """Change the fields that are given. Values replace, they are not merged.

        Raises:
            NotFoundError: no such rollout.
            ConflictError: the rollout is at an end and `status` is neither the same nor `queuing`/`requeuing`.
        """
        raise NotImplementedError

    @Operation(
        "POST /rollouts/{rollout_id}/attempts/{attempt_id}", retry="token", never_null=("status", "last_heartbeat_time")
    )
    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str | Literal["latest"],
        status: AnyAttemptStatus | Unset = UNSET,
        worker_id: str | Unset | None = UNSET,
        last_heartbeat_time: float | Unset = UNSET,
        metadata: dict[str, Any] | Unset | None = UNSET,
        *,
        outcome: Outcome | Unset = UNSET,
        outcome_reason: str | Unset | None = UNSET,
        error: AttemptError | Unset | None = UNSET,
        reward: float | Unset | None = UNSET,
        rewards: dict[str, float] | Unset | None = UNSET,
    ) -> Attempt:
        """Change the fields that are given; a change of the latest attempt's status moves the rollout.

        The store reads `reward` and `rewards` from spans; what is given here replaces them until a later span says
        another reward.

        Raises:
            NotFoundError: no such rollout or attempt.
            ConflictError: the attempt has `failed` or `succeeded` and `status` is another one.
        """
        raise NotImplementedError

    @Operation("POST /rollouts/delete", wrap="deleted", retry="token", slow=True)
    async def delete_rollouts(
        self,
        *,
        rollout_ids: Sequence[str] | None = None,
        run_id: str | Unset | None = UNSET,
        keep_last: int | None = None,
        max_age: float | None = None,
        max_bytes: int | None = None,
        force: bool = False,
    ) -> int:
        """Remove rollouts with their attempts and spans; returns how many this call removed (a repeated one: none).

        Either those with the given ids (unknown ones are passed over), or of each run, or of the one run given, those
        ended rollouts that go beyond `keep_last` (how many), `max_age` (seconds since their end) or `max_bytes` (of
        spans); with a run and no bound, all its ended ones. `force` removes a given rollout that has not ended, too.

        Raises:
            ConflictError: a given rollout has not ended; then nothing is removed.
            BadRequestError: neither ids nor a run nor a bound, or ids beside one of the others.
        """
        raise NotImplementedError

    @Operation(
        "POST /workers/{worker_id}/heartbeat",
        also=("POST /workers/{worker_id}",),
        retry="token",
        never_null=("heartbeat_stats",),
    )
    async def update_worker(
        self,
        worker_id: str,
        heartbeat_stats: dict[str, Any] | Unset = UNSET,
        *,
        run_id: str | None = None,
        attempts: Sequence[str] | None = None,
    ) -> Worker:
        """Record a sign of life of a worker, which renews the leases of its claims. Creates the worker if unknown.

        `attempts` names the attempts that the worker has in hand: those leases are renewed and no others, so a claim
        that it never heard of lapses, its lease counted from the claim. None, as a client that names none, renews all.
        """
        raise NotImplementedError

    # --- resources --------------------------------------------------------------------------------------------------

    @Operation("POST /resources", body="resources", status=201, retry="token", whole=True)
    async def add_resources(self, resources: NamedResources, *, run_id: str | None = None) -> ResourcesUpdate:
        """Publish a new set of resources under a fresh id, version 1; it becomes the latest of its run."""
        raise NotImplementedError

    @Operation(
        "POST /resources/{resources_id}",
        also=("PUT /resources/{resources_id}",),
        body="resources",
        retry="token",
        whole=True,
    )
    async def update_resources(
        self, resources_id: str, resources: NamedResources, *, run_id: str | None = None
    ) -> ResourcesUpdate:
        """Publish the next version of a set, which becomes the latest of its run; an unknown id begins at version 1."""
        raise NotImplementedError

    # --- questions --------------------------------------------------------------------------------------------------

    @Operation("POST /rollouts/search", also=("GET /rollouts",), slow=True)
    async def query_rollouts(
        self,
        *,
        status_in: Sequence[AnyRolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
        status: Sequence[AnyRolloutStatus] | None = None,
        rollout_ids: Sequence[str] | None = None,
        run_id: str | Unset | None = UNSET,
        cursor: str | None = None,
    ) -> PaginatedResult[AttemptedRollout | Rollout]:
        """Return rollouts, those with attempts as `AttemptedRollout`. `status` and `rollout_ids` are old names.

        `cursor` is that of an earlier page, in the same order: the page begins behind it, whatever came or was deleted
        meanwhile, and reading it takes no longer than the first. A store of a user may have none.

        Raises:
            BadRequestError: an argument is wrong, the cursor is of another order, or it is given beside an `offset`.
        """
        raise NotImplementedError

    @Operation("POST /rollouts/{rollout_id}/attempts/search", also=("GET /rollouts/{rollout_id}/attempts",), slow=True)
    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_by: str | None = "sequence_id",
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Attempt]:
        """Return the attempts of a rollout; none for an unknown one."""
        raise NotImplementedError

    @Operation("POST /spans/search", also=("GET /spans",), slow=True)
    async def query_spans(
        self,
        rollout_id: str,
        attempt_id: str | Literal["latest"] | None = None,
        *,
        trace_id: str | None = None,
        trace_id_contains: str | None = None,
        span_id: str | None = None,
        span_id_contains: str | None = None,
        parent_id: str | None = None,
        parent_id_contains: str | None = None,
        name: str | None = None,
        name_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        limit: int = -1,
        offset: int = 0,
        sort_by: str | None = "sequence_id",
        sort_order: SortOrder = "asc",
    ) -> PaginatedResult[Span]:
        """Return spans of a rollout, or of one attempt. Unknown ids give an empty page.

        Raises:
            GoneError: the spans of this rollout were evicted from memory.
        """
        raise NotImplementedError

    @Operation("GET /resources", slow=True)
    async def query_resources(
        self,
        *,
        resources_id: str | None = None,
        resources_id_contains: str | None = None,
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[ResourcesUpdate]:
        """Return the newest version of each set of resources; API keys are null."""
        raise NotImplementedError

    @Operation("POST /workers/search", also=("GET /workers",), slow=True)
    async def query_workers(
        self,
        *,
        status_in: Sequence[AnyWorkerStatus] | None = None,
        worker_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Worker]:
        """Return workers. Notes of runs (`semconv.CONTROL_PREFIX`) only if `worker_id_contains` begins like them."""
        raise NotImplementedError

    @Operation("GET /rollouts/{rollout_id}", whole=True)
    async def get_rollout_by_id(self, rollout_id: str) -> AttemptedRollout | Rollout | None:
        """Return one rollout, with its latest attempt if it has one; None if unknown."""
        raise NotImplementedError

    @Operation("GET /rollouts/{rollout_id}/attempts/latest")
    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        """Return the attempt with the highest number; None if there is none."""
        raise NotImplementedError

    @Operation("GET /workers/{worker_id}")
    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        """Return one worker; None if unknown."""
        raise NotImplementedError

    @Operation("GET /resources/{resources_id}", whole=True)
    async def get_resources_by_id(self, resources_id: str, version: int | None = None) -> ResourcesUpdate | None:
        """Return one version of a set (the newest by default), API keys included; None if unknown."""
        raise NotImplementedError

    @Operation("GET /resources/latest", whole=True)
    async def get_latest_resources(self, *, run_id: str | None = None) -> ResourcesUpdate | None:
        """Return what was published last for the run, else for no run; None if there is nothing."""
        raise NotImplementedError

    # --- waiting ----------------------------------------------------------------------------------------------------

    @Operation("POST /waits/rollouts", whole=True)
    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        """Return those of the rollouts that are at an end, in the order given, waiting until all are or time is up.

        `timeout` is in seconds; None waits without limit. Unknown ids are left out and not waited for.
        """
        raise NotImplementedError

    @Operation("POST /events/search")
    async def query_events(
        self, *, after: str | None = None, limit: int = 100, timeout: float = 0.0, run_id: str | Unset | None = UNSET
    ) -> EventPage:
        """Return which rollouts and runs changed after a cursor, each once and as it stands; waits for the first one.

        `after=None` is the moment of the call, "0" is before everything; any other cursor comes from an earlier page,
        of this or an earlier process. Waits up to `timeout` seconds. A page may be empty and its cursor newer, when all
        changes were of other runs.

        Raises:
            BadRequestError: not a cursor of this store.
        """
        raise NotImplementedError

    # --- runs -------------------------------------------------------------------------------------------------------

    @Operation("POST /runs/{run_id}/start", kind="run", retry="token")
    async def start_run(
        self,
        run_id: str,
        *,
        algorithm: str | None = None,
        config: dict[str, Any] | None = None,
        versions: dict[str, str] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Run:
        """Begin a run, or go on with one that is known: it is `running`, and its end, error and stop note are cleared.

        What is given replaces what it had.

        Raises:
            BadRequestError: the id is "-", begins like a note of ours (`semconv.CONTROL_PREFIX`), has a null byte or
                more than 512 characters; or the run takes more than 8 MiB.
        """
        raise keeps_no_runs(self)

    @Operation("POST /runs/{run_id}", kind="run", retry="token", never_null=("state",))
    async def update_run(
        self,
        run_id: str,
        *,
        state: RunState | Unset = UNSET,
        best: BestFigure | Unset | None = UNSET,
        error: AttemptError | Unset | None = UNSET,
        stop_reason: str | Unset | None = UNSET,
        config: dict[str, Any] | Unset | None = UNSET,
        metadata: dict[str, Any] | Unset | None = UNSET,
        heartbeat: bool = False,
    ) -> Run:
        """Change the fields that are given. A state other than `running` ends the run.

        `best` replaces a lower value of the same name, or one of another name. A `stop_reason` is stamped with
        `stop_time`, each later than the one before, and makes the run if it is unknown, without an algorithm.

        Raises:
            NotFoundError: no such run, and no `stop_reason`.
        """
        raise keeps_no_runs(self)

    @Operation("GET /runs/{run_id}", kind="run")
    async def get_run_by_id(self, run_id: str) -> Run | None:
        """Return one run; None if unknown."""
        raise keeps_no_runs(self)

    @Operation("POST /runs/search", also=("GET /runs",), kind="run", slow=True)
    async def query_runs(
        self,
        *,
        state_in: Sequence[RunState] | None = None,
        algorithm: str | None = None,
        run_id_contains: str | None = None,
        sort_by: str | None = "start_time",
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Run]:
        """Return the runs that pass every filter."""
        raise keeps_no_runs(self)

    @Operation("POST /runs/{run_id}/records", kind="run", wrap="added", status=201, retry="token")
    async def add_run_records(self, run_id: str, records: Sequence[RunRecord]) -> int:
        """Store records, all or none; returns how many were new. It is a sign of life of the run.

        A record with the kind, step and name of one that is there changes nothing. Numbers that are not finite become
        null, and the store says the time.

        Raises:
            NotFoundError: no such run.
            BadRequestError: a record takes more than 8 MiB of JSON, or there are more than 10,000.
            BusyError: the store is full.
        """
        raise keeps_no_runs(self)

    @Operation("POST /runs/{run_id}/records/search", also=("GET /runs/{run_id}/records",), kind="run", slow=True)
    async def query_run_records(
        self,
        run_id: str,
        *,
        kind_in: Sequence[RecordKind] | None = None,
        step_from: int | None = None,
        step_to: int | None = None,
        name: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
        cursor: str | None = None,
    ) -> PaginatedResult[RunRecord]:
        """Return records that pass every filter, by step and then as they were stored; none of an unknown run.

        Both bounds of the step are inclusive. A page with a `limit` ends early where its records take more than 16 MiB;
        its `cursor` is then where the next page of the same filters and order begins, as after every page but the last.

        Raises:
            BadRequestError: an argument is wrong, the cursor is of another order, or it is given beside an `offset`.
        """
        raise keeps_no_runs(self)

    @Operation("POST /runs/{run_id}/rewind", kind="run", wrap="removed", retry="token", slow=True)
    async def rewind_run(self, run_id: str, step: int) -> int:
        """Remove the records of every kind after a step, for a run that goes on from there; returns how many.

        Raises:
            NotFoundError: no such run.
        """
        raise keeps_no_runs(self)

    @Operation("POST /runs/delete", kind="run", wrap="deleted", retry="token", slow=True)
    async def delete_runs(self, run_ids: Sequence[str], *, force: bool = False) -> int:
        """Remove runs with their records; returns how many. Unknown ones are passed over, rollouts stay.

        Raises:
            ConflictError: one is `running`; then nothing is removed, unless with `force`.
        """
        raise keeps_no_runs(self)

    @Operation("POST /vocabularies/{vocabulary_id}", kind="run", body="tokens", wrap="added")
    async def add_vocabulary(self, vocabulary_id: str, tokens: Sequence[str]) -> bool:
        """Store the text of each token id of a tokenizer; False if there is one of this id, which then stays.

        Raises:
            BadRequestError: it takes more than 8 MiB of JSON.
        """
        raise keeps_no_runs(self)

    @Operation("GET /vocabularies/{vocabulary_id}", kind="run", whole=True)
    async def get_vocabulary(self, vocabulary_id: str) -> list[str] | None:
        """Return the text of each token id; None if unknown."""
        raise keeps_no_runs(self)

    # --- many rollouts in short -------------------------------------------------------------------------------------

    @Operation("POST /rollouts/summaries", also=("GET /rollouts/summaries",), kind="default", bounded=True, slow=True)
    async def query_rollout_summaries(
        self,
        *,
        filter: RolloutFilter | None = None,
        sort_by: AnySummarySort = "start_time",
        sort_order: SortOrder = "desc",
        limit: int = 100,
        offset: int = 0,
        cursor: str | None = None,
    ) -> SummaryPage:
        """Return rollouts that pass the filter, in short, and exactly how many there are.

        Those without what is sorted by are last in both orders. `cursor` is that of an earlier page, in the same order;
        the page after it stays the right one while rollouts are added. `limit` is from 1 to 1000.

        Raises:
            BadRequestError: an argument is wrong, the cursor is of another order, or it is given beside an `offset`.
        """
        from agentlightning.store.summaries.defaults import query_summaries

        return await query_summaries(self, filter, sort_by, sort_order, limit=limit, offset=offset, cursor=cursor)

    @Operation("POST /rollouts/aggregate", kind="default", slow=True)
    async def aggregate_rollouts(
        self,
        *,
        by: AggregateBy = "step",
        filter: RolloutFilter | None = None,
        buckets: int = 0,
        dimension: str | None = None,
    ) -> RolloutAggregate:
        """Return figures of the rollouts that pass the filter, in groups: counts, mean and quantiles of the rewards.

        `buckets` (at most 100) asks for a histogram of the rewards. `dimension` takes one dimension of the rewards in
        the place of the reward.

        Raises:
            BadRequestError: an argument is wrong.
        """
        from agentlightning.store.summaries.defaults import aggregate

        return await aggregate(self, by, filter, buckets, dimension)

    # --- single things ----------------------------------------------------------------------------------------------

    def record_metric(self, name: str, value: float, tags: Mapping[str, str] | None = None) -> asyncio.Task[None]:
        """Begin `observe_metric` from code that cannot await it, on the running loop; return its task.

        Raises:
            RuntimeError: no event loop runs here.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError(
                "record_metric needs a running event loop; elsewhere: asyncio.run(store.observe_metric(...))"
            ) from None
        task = loop.create_task(self.observe_metric(name, value, tags))
        recording.add(task)
        task.add_done_callback(recording.discard)
        return task

    @Operation("POST /metrics/observations", kind="default")
    async def observe_metric(self, name: str, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Add a value to a histogram of the program's own, which the store's page of metrics shows (`/v1/prometheus`).

        A name has the same tags each time. A repeated call counts again.

        Raises:
            BadRequestError: the name or a tag is no name, other tags than before, or too many of either.
        """
        from agentlightning.store.metrics import observe

        observe(name, value, tags)

    @Operation("GET /spans/outlines", kind="default", bounded=True, slow=True)
    async def query_span_outlines(
        self,
        rollout_id: str,
        attempt_id: str | Literal["latest"] | None = None,
        *,
        limit: int = 5000,
        offset: int = 0,
    ) -> PaginatedResult[SpanOutline]:
        """Return spans of a rollout, or of one attempt, without their attributes, by number.

        `limit` is from 1 to 20,000.

        Raises:
            BadRequestError: `limit` or `offset` is out of its range.
            GoneError: the spans of this rollout were evicted from memory.
        """
        from agentlightning.store.details import check_outline_page, outline_of_span

        check_outline_page(limit, offset)
        page = await self.query_spans(rollout_id, attempt_id, limit=limit, offset=offset)
        items = [outline_of_span(span) for span in page]
        return PaginatedResult(items=items, limit=limit, offset=offset, total=page.total)

    @Operation("GET /rollouts/{rollout_id}/attempts/{attempt_id}/spans/{span_id}", kind="default")
    async def get_span(self, rollout_id: str, attempt_id: str, span_id: str) -> Span | None:
        """Return one span; None if unknown. Of several with one id, from different traces, the one of least number.

        Raises:
            GoneError: the spans of this rollout were evicted from memory.
        """
        page = await self.query_spans(rollout_id, attempt_id)
        return next((span for span in page if span.span_id == span_id), None)

    @Operation("GET /resources/{resources_id}/versions", kind="default", bounded=True)
    async def query_resource_versions(
        self, resources_id: str, *, sort_order: SortOrder = "desc", limit: int = 100, offset: int = 0
    ) -> PaginatedResult[ResourcesUpdate]:
        """Return the versions of a set of resources, the newest first; API keys are null. None for an unknown one.

        `limit` is from 1 to 1000.

        Raises:
            BadRequestError: an argument is out of its range.
        """
        from agentlightning.store.details import page_of_versions, without_keys

        store = self
        newest = await store.get_resources_by_id(resources_id)
        total = 0 if newest is None else newest.version
        items: list[ResourcesUpdate] = []
        for number in page_of_versions(total, sort_order, limit, offset):
            update = newest if number == total else await store.get_resources_by_id(resources_id, version=number)
            if update is not None:
                items.append(without_keys(update))
        return PaginatedResult(items=items, limit=limit, offset=offset, total=total)

    @Operation("POST /vocabularies/{vocabulary_id}/texts", kind="default", whole=True)
    async def get_token_texts(self, vocabulary_id: str, token_ids: Sequence[int]) -> list[TokenText] | None:
        """Return the text of each token id by a vocabulary of `add_vocabulary`; None if there is no such vocabulary.

        Raises:
            BadRequestError: there are more than 200,000 ids.
        """
        from agentlightning.store.details import texts_of

        return texts_of(await self.get_vocabulary(vocabulary_id), token_ids)

    # --- histories of other stores ----------------------------------------------------------------------------------

    @Operation("POST /history", kind="default", status=201, slow=True)
    async def import_history(
        self,
        *,
        resources: Sequence[ResourcesUpdate] = (),
        rollouts: Sequence[Rollout] = (),
        attempts: Sequence[Attempt] = (),
        spans: Sequence[Span] = (),
    ) -> HistoryImport:
        """Take in pieces of a finished history: with the ids, times, statuses and numbers that they have.

        Rollouts and attempts must have ended. The attempts of a rollout come in the order of their numbers, from 1 on,
        with their rollout or later; spans with their attempt or later, each with its number. What is there already is
        left as it is, so a call may be repeated, and several may run at once. A piece that cannot be taken is named in
        the answer, and the others are taken: a rollout with its attempts and spans at once, after the resources; many
        rollouts in several steps, between which others are served. Nothing of it is claimed, retried, or counted as
        work of this store.

        An attempt that says no outcome is given one: `scored` if it succeeded and a span of it carries a finite reward,
        `unscored` if it succeeded without, and for other statuses that of an attempt here which says none.

        Raises:
            BadRequestError: a value has not the shape of its field, or a span has no number.
            BusyError: the store is full. The resources were taken, and of a long history some of the rollouts.
            TooLargeError: a rollout with its attempts is more than the store holds in one piece. The same was taken.
            NotImplementedError: this store takes in no history; those of this package do.
        """
        raise NotImplementedError(
            "This store does not implement import_history; import into one of this package, such as sqlite:///FILE"
        )

    # --- short forms, the same for every store ----------------------------------------------------------------------

    async def wait_for_rollout(self, rollout_id: str, timeout: float | None = None) -> Rollout | None:
        """Wait for one rollout; None if it is not at an end in time."""
        finished = await self.wait_for_rollouts(rollout_ids=[rollout_id], timeout=timeout)
        return finished[0] if finished else None

    @Operation("POST /rollouts/{rollout_id}/attempt/{attempt_id}/finish", kind="short", retry="token")
    async def finish_attempt(
        self, rollout_id: str, attempt_id: str = "latest", *, status: AnyAttemptStatus = "succeeded"
    ) -> Attempt:
        """End an attempt; the same as `update_attempt` with a status."""
        return await self.update_attempt(rollout_id, attempt_id, status=status)

    @Operation("POST /workers", kind="short", retry="token")
    async def register_worker(
        self, worker_id: str, heartbeat_stats: dict[str, Any] | Unset = UNSET, *, run_id: str | None = None
    ) -> Worker:
        """Make a worker known before its first claim; the same as its first heartbeat (`update_worker`)."""
        return await self.update_worker(worker_id, heartbeat_stats, run_id=run_id)

    @Operation("POST /rollouts/{rollout_id}/finish", kind="short", retry="token")
    async def finish_rollout(self, rollout_id: str, attempt_id: str = "latest", response: Any = None) -> Rollout:
        """End a rollout well; `response` goes to the attempt's metadata under the key `response`."""
        metadata: dict[str, Any] | Unset = UNSET if response is None else {"response": response}
        await self.update_attempt(rollout_id, attempt_id, status="succeeded", metadata=metadata)
        return await self._existing(rollout_id)

    async def fail_rollout(self, rollout_id: str, attempt_id: str = "latest", *, reason: str | None = None) -> Rollout:
        """End an attempt as failed, with a reason; the rollout follows (it may be queued again)."""
        await self.update_attempt(
            rollout_id, attempt_id, status="failed", outcome="infrastructure_fault", outcome_reason=reason
        )
        return await self._existing(rollout_id)

    async def list_rollouts(
        self, options: FilterOptions | None = None, /, **filters: Any
    ) -> PaginatedResult[AttemptedRollout | Rollout]:
        """The same as `query_rollouts`; takes a `FilterOptions`, too."""
        return await self.query_rollouts(**(options or {}), **filters)

    async def _existing(self, rollout_id: str) -> Rollout:
        """Return a rollout whose attempt was just ended."""
        rollout = await self.get_rollout_by_id(rollout_id)
        if rollout is None:
            raise NotFoundError(f"Rollout {rollout_id} not found: it was deleted just after its attempt was ended")
        return rollout


def keeps_no_runs(store: object) -> NotImplementedError:
    """Return the error of a store that lacks these operations."""
    return NotImplementedError(
        f"{type(store).__name__} keeps no runs: it does not implement the operations of "
        "agentlightning.store.base. Training goes on; to look at its records, use a store of this package"
    )
