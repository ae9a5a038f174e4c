"""LightningStore: the contract of every store. Implementations document only what differs.

Every operation is a coroutine and raises the classes of `agentlightning.errors`: `NotFoundError` for an action on an
unknown id, `ConflictError` for a change that the current state forbids, `BadRequestError` for a wrong value. Getters
return None for an unknown id. Times are wall-clock seconds. Each method is declared here once, with `@Operation`
(`operations.py`). The server, the client and the wrappers are generated from the declaration.
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
    """Return True if the rollout is waiting for a worker."""
    return rollout.status in QUEUING


def is_running(rollout: Rollout) -> bool:
    """Return True if a worker has claimed the rollout and is running it."""
    return rollout.status in RUNNING


def is_finished(rollout: Rollout) -> bool:
    """Return True if the rollout has ended."""
    return rollout.status in FINISHED


class RequestToken(str):
    """Token of one request. It numbers the calls of each operation within the request.

    One request can need several calls, for example if an operation is overridden or a claim is retried. If all calls
    had the same token, the second would get the result of the first. A repeated request numbers its calls the same way.
    """

    def __init__(self, _: str) -> None:
        self._calls: Counter[str] = Counter()

    def of_call(self, operation: str) -> str:
        """Return the token for the next call of an operation: this token for the first call, a derived one after it."""
        number = self._calls[operation]
        self._calls[operation] += 1
        return f"{self}/{number}" if number else str(self)


request_token: ContextVar[str | None] = ContextVar("agentlightning_request_token", default=None)
"""Idempotency token of the call in progress. The ids of created objects are derived from it, so a call that is
repeated with the same token returns the first result and changes nothing. A `RequestToken` covers several calls."""


def call_token(operation: str) -> str | None:
    """Return the token of the operation call that starts now, or None. Call it once for each operation call."""
    token = request_token.get()
    return token.of_call(operation) if isinstance(token, RequestToken) else token


class LightningStoreCapabilities(TypedDict, total=False):
    """Capabilities of a store. A missing key means False."""

    async_safe: bool
    """May be called by concurrent coroutines."""
    thread_safe: bool
    """May be called from concurrent threads."""
    zero_copy: bool
    """All processes that hold the store see the same data."""
    otlp_traces: bool
    """Has an OTLP/HTTP endpoint."""
    distributed: bool
    """Data is shared across processes or machines."""
    persistent: bool
    """Data outlives the process."""
    persistence: bool
    """Same as `persistent`."""


class LightningStoreStatistics(TypedDict, total=False):
    """Counters of a store."""

    name: str
    """The class of the store."""
    total_rollouts: int
    """Rollouts in the store, of any status."""
    total_attempts: int
    """Attempts of these rollouts."""
    total_spans: int
    """Spans of these attempts."""
    total_resources: int
    """Sets of resources; the versions of a set count as one."""
    total_workers: int
    """Workers known to the store."""
    uptime: float
    """Seconds since the store was created."""
    total_span_bytes: int
    """Size of the spans in bytes."""
    eviction_threshold_bytes: int
    """Largest size of the spans in the memory store, in bytes. Above it, spans of ended rollouts are evicted."""
    safe_threshold_bytes: int
    """Size of the spans in bytes at which eviction stops."""
    memory_capacity_bytes: int
    """Memory that this process may use, in bytes."""
    lease_seconds: float
    """Seconds without a heartbeat before a worker's claims are released."""
    retention: dict[str, float]
    """Limits that the `RetentionPolicy` sets; missing if everything is kept."""


_ELSEWHERE: Final[dict[str, str]] = {
    "collections": (
        "each operation is a separate transaction, such as await store.update_resources(resources_id, resources); "
        "a new backend implements `Backend` and `Tx` (agentlightning/store/rules/tx.py)"
    ),
    "cancel_rollout": "call update_rollout(rollout_id, status='cancelled')",
}
"""Names that programs use but that do not exist, with what to use instead."""

recording: set[asyncio.Task[None]] = set()
"""Pending `record_metric` calls."""


class LightningStore:
    """The contract of a store, which keeps rollouts, attempts, spans, resources, workers and runs."""

    if TYPE_CHECKING:

        @property
        def traces(self) -> Traces:
            """The spans of all rollouts: `await store.traces.get_all()`."""
            ...

    else:  # not a property, so that a user's store can have an attribute with this name

        def __getattr__(self, name: str) -> Any:
            if name == "traces":
                return Traces(self)
            hint = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        """Capabilities of this store; none by default."""
        return {"async_safe": False, "thread_safe": False, "zero_copy": False, "otlp_traces": False}

    def otlp_traces_endpoint(self) -> str:
        """Return the URL that accepts OTLP traces (ends in /v1/traces).

        Raises:
            NotImplementedError: the store has no OTLP endpoint.
        """
        raise NotImplementedError(f"{type(self).__name__} has no OTLP endpoint; add spans with add_many_spans")

    async def close(self) -> None:
        """Release connections, files and threads. Calling it again does nothing."""

    @Operation("GET /statistics", slow=True)
    async def statistics(self) -> LightningStoreStatistics:
        """Return the counters of the store."""
        return {"name": type(self).__name__}

    # --- adding work ------------------------------------------------------------------------------------------------

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
        """Create a rollout with its first attempt (status `preparing`), without queuing it.

        `resources_id=None` uses the latest resources of the run, pinned to their current version.
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
        """Create a rollout and add it to the queue of its run.

        Rollouts with the highest `priority` are claimed first. Among rollouts with the same priority, the one that has
        been claimable for longest is claimed first. A rollout is not claimed before `not_before` (wall-clock seconds).

        Raises:
            TypeError: `input` contains a value that is not JSON; the message gives its position.
        """
        raise NotImplementedError

    @Operation("POST /queues/rollouts/enqueue", status=201, retry="token", whole=True)
    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
        """Enqueue a batch of rollouts in order: either all of them or none. An empty batch returns an empty list."""
        raise NotImplementedError

    @Operation(many="dequeue_many_rollouts")
    async def dequeue_rollout(
        self, worker_id: str | None = None, *, timeout: float = 0.0, run_id: str | None = None
    ) -> AttemptedRollout | None:
        """Claim the next queued rollout of the run and start an attempt; return None if the queue is empty.

        Waits up to `timeout` seconds for a rollout. A claim is a lease: if a worker has sent heartbeats and then stops
        sending them, its claims are released.
        """
        raise NotImplementedError

    @Operation("POST /queues/rollouts/dequeue", retry="token", whole=True)
    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None, timeout: float = 0.0, run_id: str | None = None
    ) -> list[AttemptedRollout]:
        """Claim up to `limit` rollouts, in the order of the queue. Waits up to `timeout` seconds for the first one."""
        raise NotImplementedError

    @Operation(
        "POST /rollouts/{rollout_id}/attempts",
        also=("POST /rollouts/{rollout_id}/attempt", "POST /rollouts/{rollout_id}/start"),
        status=201,
        retry="token",
        whole=True,
    )
    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        """Start another attempt of a rollout, whatever its status. This also reopens a rollout that has ended.

        Raises:
            NotFoundError: the rollout does not exist.
        """
        raise NotImplementedError

    # --- adding spans -----------------------------------------------------------------------------------------------

    @Operation("POST /spans", body="span", status=201, many="add_many_spans")
    async def add_span(self, span: Span) -> Span | None:
        """Store one span and return it; return None if a span with this rollout, attempt and span id exists already.

        A span counts as a heartbeat: its attempt changes from `preparing` or `unresponsive` to `running`. A span of an
        attempt that has ended or is not the latest is stored with the mark `agentlightning.stale`.

        Raises:
            NotFoundError: the rollout or attempt does not exist.
        """
        raise NotImplementedError

    @Operation("POST /spans/batch", status=201)
    async def add_many_spans(self, spans: Sequence[Span]) -> list[Span]:
        """Store spans in one step and return the new ones, in the given order.

        A span with a `sequence_id` below 0 gets the next number of its rollout. If a call is repeated because its
        response was lost, it may return an empty list.

        Raises:
            NotFoundError: a rollout or attempt does not exist; nothing is stored.
        """
        raise NotImplementedError

    @Operation(kind="default")
    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: ReadableSpan, sequence_id: int | None = None
    ) -> Span | None:
        """Convert an ended OpenTelemetry span, store it and return the stored span, even if it existed already.

        If `sequence_id` is None, the store assigns the number. If a request is repeated because its response was lost,
        it returns the same span.
        """
        number = -1 if sequence_id is None else sequence_id
        span = Span.from_opentelemetry(readable_span, rollout_id, attempt_id, number)
        return await self.add_span(span) or await self.get_span(rollout_id, attempt_id, span.span_id)

    @Operation("POST /spans/next", wrap="sequence_id", many="get_many_span_sequence_ids")
    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """Return the next span number of a rollout, starting at 1. All attempts share one sequence without repeats.

        Raises:
            NotFoundError: the rollout does not exist.
        """
        raise NotImplementedError

    @Operation("POST /spans/next/batch", wrap="sequence_ids")
    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> list[int]:
        """Return the next span number for each (rollout, attempt) pair, in the given order."""
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
        """Change the given fields of a rollout. A new value replaces the old one; dictionaries are not merged.

        Raises:
            NotFoundError: the rollout does not exist.
            ConflictError: the rollout has ended, and `status` is neither its current status nor `queuing`/`requeuing`.
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
        """Change the given fields of an attempt. The status of the latest attempt also sets the rollout's status.

        The store reads `reward` and `rewards` from spans. Values that you pass here replace them until a later span
        sets another reward.

        Raises:
            NotFoundError: the rollout or attempt does not exist.
            ConflictError: the attempt has `failed` or `succeeded`, and `status` is a different status.
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
        """Remove rollouts with their attempts and spans; return the number of removed rollouts.

        Select the rollouts in one of two ways:

        - `rollout_ids`: these rollouts; unknown ids are ignored. `force` also removes rollouts that have not ended.
        - `run_id` and limits: the ended rollouts of this run (by default of each run) beyond `keep_last` (a number),
          `max_age` (seconds since their end) or `max_bytes` (of spans). With a run and no limit: all ended rollouts.

        Raises:
            ConflictError: one of `rollout_ids` has not ended and `force` is False; nothing is removed.
            BadRequestError: nothing is selected, or `rollout_ids` is combined with `run_id` or a limit.
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
        """Record a heartbeat of a worker, which renews the leases of its claims. Creates the worker if it is unknown.

        `attempts` lists the attempts that the worker is running. Only their leases are renewed, so a claim that the
        worker never received expires after one lease. None renews all leases of the worker.
        """
        raise NotImplementedError

    # --- resources --------------------------------------------------------------------------------------------------

    @Operation("POST /resources", body="resources", status=201, retry="token", whole=True)
    async def add_resources(self, resources: NamedResources, *, run_id: str | None = None) -> ResourcesUpdate:
        """Publish a new set of resources under a new id, as version 1. It becomes the latest set of its run."""
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
        """Publish the next version of a set of resources (1 for a new id). It becomes the latest set of its run."""
        raise NotImplementedError

    # --- queries ----------------------------------------------------------------------------------------------------

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
        """Return the rollouts that match the filters. A rollout with attempts is an `AttemptedRollout`.

        `cursor` comes from an earlier page in the same order. The page starts after it, even if rollouts were added or
        deleted since, and is as fast to read as the first page. A store that you wrote may not support cursors.
        `status` and `rollout_ids` are older names of `status_in` and `rollout_id_in`.

        Raises:
            BadRequestError: an argument is wrong, the cursor belongs to another order, or both a cursor and an `offset`
                are given.
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
        """Return the attempts of a rollout; an empty page if the rollout does not exist."""
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
        """Return the spans of a rollout, or of one attempt; an empty page if the id is unknown.

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
        """Return the newest version of each set of resources, with API keys set to null."""
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
        """Return workers. Notes of runs are included if `worker_id_contains` begins with `semconv.CONTROL_PREFIX`."""
        raise NotImplementedError

    @Operation("GET /rollouts/{rollout_id}", whole=True)
    async def get_rollout_by_id(self, rollout_id: str) -> AttemptedRollout | Rollout | None:
        """Return one rollout, with its latest attempt if it has one; None if the id is unknown."""
        raise NotImplementedError

    @Operation("GET /rollouts/{rollout_id}/attempts/latest")
    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        """Return the latest attempt of a rollout; None if it has none."""
        raise NotImplementedError

    @Operation("GET /workers/{worker_id}")
    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        """Return one worker; None if the id is unknown."""
        raise NotImplementedError

    @Operation("GET /resources/{resources_id}", whole=True)
    async def get_resources_by_id(self, resources_id: str, version: int | None = None) -> ResourcesUpdate | None:
        """Return one version of a set of resources (the newest by default), with API keys; None if unknown."""
        raise NotImplementedError

    @Operation("GET /resources/latest", whole=True)
    async def get_latest_resources(self, *, run_id: str | None = None) -> ResourcesUpdate | None:
        """Return the latest resources of the run; if it has none, the latest ones without a run, or None."""
        raise NotImplementedError

    # --- waiting ----------------------------------------------------------------------------------------------------

    @Operation("POST /waits/rollouts", whole=True)
    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        """Wait until all given rollouts have ended or the timeout is over; return the ended ones, in the given order.

        `timeout` is in seconds; None waits without a limit. Unknown ids are ignored.
        """
        raise NotImplementedError

    @Operation("POST /events/search")
    async def query_events(
        self, *, after: str | None = None, limit: int = 100, timeout: float = 0.0, run_id: str | Unset | None = UNSET
    ) -> EventPage:
        """Return the rollouts and runs that changed after a cursor, each once and in its current state.

        `after=None` starts at the time of the call and "0" at the beginning. Any other cursor comes from an earlier
        page, also of an earlier process. Waits up to `timeout` seconds for the first change. If all changes belong to
        other runs, the page is empty and its cursor is newer.

        Raises:
            BadRequestError: `after` is not a cursor of this store.
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
        """Start a run, or continue an existing one.

        Sets its state to `running` and clears its end, error and stop request. The given values replace earlier ones.

        Raises:
            BadRequestError: the id is "-", begins with `semconv.CONTROL_PREFIX`, contains a null byte or has more than
                512 characters; or the run takes more than 8 MiB of JSON.
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
        """Change the given fields of a run. A state other than `running` ends the run.

        `best` is stored if it has another name than the stored value or is greater. A `stop_reason` requests a stop: it
        sets `stop_time` to a time later than any earlier one, and creates the run (without an algorithm) if it is
        unknown.

        Raises:
            NotFoundError: the run does not exist and there is no `stop_reason`.
        """
        raise keeps_no_runs(self)

    @Operation("GET /runs/{run_id}", kind="run")
    async def get_run_by_id(self, run_id: str) -> Run | None:
        """Return one run; None if the id is unknown."""
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
        """Return the runs that match all filters."""
        raise keeps_no_runs(self)

    @Operation("POST /runs/{run_id}/records", kind="run", wrap="added", status=201, retry="token")
    async def add_run_records(self, run_id: str, records: Sequence[RunRecord]) -> int:
        """Store records of a run, either all or none; return the number of new ones. Counts as a heartbeat of the run.

        A record with the kind, step and name of an existing record is ignored. Numbers that are not finite become null.
        The store sets the time.

        Raises:
            NotFoundError: the run does not exist.
            BadRequestError: a record takes more than 8 MiB of JSON, or there are more than 10,000 records.
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
        """Return the records that match all filters, by step and then in the order in which they were stored.

        `step_from` and `step_to` are inclusive. A page with a `limit` ends early if its records take more than 16 MiB.
        Every page but the last has a `cursor`: pass it with the same filters and order to get the next page. An unknown
        run has no records.

        Raises:
            BadRequestError: an argument is wrong, the cursor belongs to another order, or both a cursor and an `offset`
                are given.
        """
        raise keeps_no_runs(self)

    @Operation("POST /runs/{run_id}/rewind", kind="run", wrap="removed", retry="token", slow=True)
    async def rewind_run(self, run_id: str, step: int) -> int:
        """Remove all records after a step, so that the run can continue from it; return the number of removed records.

        Raises:
            NotFoundError: the run does not exist.
        """
        raise keeps_no_runs(self)

    @Operation("POST /runs/delete", kind="run", wrap="deleted", retry="token", slow=True)
    async def delete_runs(self, run_ids: Sequence[str], *, force: bool = False) -> int:
        """Remove runs with their records, not their rollouts; return the number removed. Unknown ids are ignored.

        Raises:
            ConflictError: a run is `running` and `force` is False; nothing is removed.
        """
        raise keeps_no_runs(self)

    @Operation("POST /vocabularies/{vocabulary_id}", kind="run", body="tokens", wrap="added")
    async def add_vocabulary(self, vocabulary_id: str, tokens: Sequence[str]) -> bool:
        """Store the text of each token id of a tokenizer; return False and change nothing if the vocabulary exists.

        Raises:
            BadRequestError: the vocabulary takes more than 8 MiB of JSON.
        """
        raise keeps_no_runs(self)

    @Operation("GET /vocabularies/{vocabulary_id}", kind="run", whole=True)
    async def get_vocabulary(self, vocabulary_id: str) -> list[str] | None:
        """Return the text of each token id of a vocabulary; None if the id is unknown."""
        raise keeps_no_runs(self)

    # --- summaries of many rollouts ---------------------------------------------------------------------------------

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
        """Return summaries of the rollouts that match the filter, and their exact number.

        Rollouts without a value for `sort_by` are last in both orders. `cursor` comes from an earlier page in the same
        order; the page after it stays correct while rollouts are added. `limit` is from 1 to 1000.

        Raises:
            BadRequestError: an argument is wrong, the cursor belongs to another order, or both a cursor and an `offset`
                are given.
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
        """Return statistics of the rollouts that match the filter, by group: counts, mean and quantiles of the rewards.

        `buckets` (0 to 100) is the number of histogram buckets for the rewards; 0 returns no histogram. `dimension`
        uses one dimension of the rewards instead of the reward.

        Raises:
            BadRequestError: an argument is wrong.
        """
        from agentlightning.store.summaries.defaults import aggregate

        return await aggregate(self, by, filter, buckets, dimension)

    # --- details ----------------------------------------------------------------------------------------------------

    def record_metric(self, name: str, value: float, tags: Mapping[str, str] | None = None) -> asyncio.Task[None]:
        """Start `observe_metric` on the running event loop, from code that cannot await it; return its task.

        Raises:
            RuntimeError: no event loop is running in this thread.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError(
                "record_metric needs a running event loop; without one, use asyncio.run(store.observe_metric(...))"
            ) from None
        task = loop.create_task(self.observe_metric(name, value, tags))
        recording.add(task)
        task.add_done_callback(recording.discard)
        return task

    @Operation("POST /metrics/observations", kind="default")
    async def observe_metric(self, name: str, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Add a value to a histogram of your program. It appears among the metrics of the store (`/v1/prometheus`).

        All values of a metric must have the same tag names. A repeated call is counted again.

        Raises:
            BadRequestError: the name or a tag is invalid, the tag names differ from earlier ones, or there are too many
                metrics or tag values.
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
        """Return the spans of a rollout, or of one attempt, without their attributes, in the order of their numbers.

        `limit` is from 1 to 20,000.

        Raises:
            BadRequestError: `limit` or `offset` is out of range.
            GoneError: the spans of this rollout were evicted from memory.
        """
        from agentlightning.store.details import check_outline_page, outline_of_span

        check_outline_page(limit, offset)
        page = await self.query_spans(rollout_id, attempt_id, limit=limit, offset=offset)
        items = [outline_of_span(span) for span in page]
        return PaginatedResult(items=items, limit=limit, offset=offset, total=page.total)

    @Operation("GET /rollouts/{rollout_id}/attempts/{attempt_id}/spans/{span_id}", kind="default")
    async def get_span(self, rollout_id: str, attempt_id: str, span_id: str) -> Span | None:
        """Return one span; None if unknown. If several traces have a span with this id, return the lowest-numbered one.

        Raises:
            GoneError: the spans of this rollout were evicted from memory.
        """
        page = await self.query_spans(rollout_id, attempt_id)
        return next((span for span in page if span.span_id == span_id), None)

    @Operation("GET /resources/{resources_id}/versions", kind="default", bounded=True)
    async def query_resource_versions(
        self, resources_id: str, *, sort_order: SortOrder = "desc", limit: int = 100, offset: int = 0
    ) -> PaginatedResult[ResourcesUpdate]:
        """Return the versions of a set of resources, with API keys set to null; an empty page if the id is unknown.

        The newest version comes first by default. `limit` is from 1 to 1000.

        Raises:
            BadRequestError: an argument is out of range.
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
        """Return the text of each token id in a vocabulary of `add_vocabulary`; None if the vocabulary does not exist.

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
        """Import parts of a finished history with their ids, times, statuses and numbers.

        - All rollouts and attempts must have ended.
        - Attempts of a rollout come in the order of their numbers, from 1, in the call of their rollout or later.
        - Spans come in the call of their attempt or later, each with its number.
        - Existing data is not changed, so you can repeat a call and run several calls at the same time.
        - The result lists each part that cannot be imported. All other parts are imported: resources first, then each
          rollout together with its attempts and spans. Other calls are served between the steps of a long import.
        - Imported data is not claimed or retried, and does not count as work of this store.

        An attempt without an outcome gets one: `scored` if it succeeded and one of its spans has a finite reward,
        `unscored` if it succeeded without a reward, otherwise the default outcome of its status.

        Raises:
            BadRequestError: a value has the wrong type, or a span has no number.
            BusyError: the store is full. The resources and, in a long history, some rollouts were imported.
            TooLargeError: a rollout with its attempts is too large. The resources and some rollouts were imported.
            NotImplementedError: this store does not support imports; all stores of this package do.
        """
        raise NotImplementedError(
            "This store does not implement import_history; import into a store of this package, such as sqlite:///FILE"
        )

    # --- shortcuts, the same for every store ------------------------------------------------------------------------

    async def wait_for_rollout(self, rollout_id: str, timeout: float | None = None) -> Rollout | None:
        """Wait for one rollout and return it; return None if it does not end within `timeout` seconds."""
        finished = await self.wait_for_rollouts(rollout_ids=[rollout_id], timeout=timeout)
        return finished[0] if finished else None

    @Operation("POST /rollouts/{rollout_id}/attempt/{attempt_id}/finish", kind="short", retry="token")
    async def finish_attempt(
        self, rollout_id: str, attempt_id: str = "latest", *, status: AnyAttemptStatus = "succeeded"
    ) -> Attempt:
        """End an attempt. Same as `update_attempt` with a status."""
        return await self.update_attempt(rollout_id, attempt_id, status=status)

    @Operation("POST /workers", kind="short", retry="token")
    async def register_worker(
        self, worker_id: str, heartbeat_stats: dict[str, Any] | Unset = UNSET, *, run_id: str | None = None
    ) -> Worker:
        """Register a worker before its first claim. Same as its first heartbeat (`update_worker`)."""
        return await self.update_worker(worker_id, heartbeat_stats, run_id=run_id)

    @Operation("POST /rollouts/{rollout_id}/finish", kind="short", retry="token")
    async def finish_rollout(self, rollout_id: str, attempt_id: str = "latest", response: Any = None) -> Rollout:
        """End a rollout as succeeded. `response` is stored in the attempt's metadata under the key `response`."""
        metadata: dict[str, Any] | Unset = UNSET if response is None else {"response": response}
        await self.update_attempt(rollout_id, attempt_id, status="succeeded", metadata=metadata)
        return await self._existing(rollout_id)

    async def fail_rollout(self, rollout_id: str, attempt_id: str = "latest", *, reason: str | None = None) -> Rollout:
        """End an attempt as failed, with a reason. The rollout fails or is requeued."""
        await self.update_attempt(
            rollout_id, attempt_id, status="failed", outcome="infrastructure_fault", outcome_reason=reason
        )
        return await self._existing(rollout_id)

    async def list_rollouts(
        self, options: FilterOptions | None = None, /, **filters: Any
    ) -> PaginatedResult[AttemptedRollout | Rollout]:
        """Return the rollouts that match the filters. Same as `query_rollouts`; also accepts a `FilterOptions`."""
        return await self.query_rollouts(**(options or {}), **filters)

    async def _existing(self, rollout_id: str) -> Rollout:
        """Return a rollout after its attempt has ended."""
        rollout = await self.get_rollout_by_id(rollout_id)
        if rollout is None:
            raise NotFoundError(f"Rollout {rollout_id} not found: it was deleted immediately after its attempt ended")
        return rollout


def keeps_no_runs(store: object) -> NotImplementedError:
    """Return the error that a store without support for runs raises."""
    return NotImplementedError(
        f"{type(store).__name__} does not store runs: it does not implement the run operations of "
        "agentlightning.store.base. Training continues without records. To keep records, use a store of this package."
    )
