"""LightningStore: the contract of every store. Implementations document only what differs.

Every operation is a coroutine, safe to repeat if documented so, and raises the classes of `agentlightning.errors`:
`NotFoundError` for acting on an unknown id, `ConflictError` for a change that the present state forbids,
`BadRequestError` for a wrong value. Getters return None for an unknown id. Times are wall-clock seconds. A method is
declared here once, with `@Operation` (`operations.py`); server, client and wrappers are made from the declaration.
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
    """Return True if the rollout waits for a worker."""
    return rollout.status in QUEUING


def is_running(rollout: Rollout) -> bool:
    """Return True if a worker has claimed the rollout and runs it."""
    return rollout.status in RUNNING


def is_finished(rollout: Rollout) -> bool:
    """Return True if the rollout has ended."""
    return rollout.status in FINISHED


class RequestToken(str):
    """Token of one request, whose calls of one operation are numbered.

    One request may take several calls (an overridden form of an operation, a claim that is asked for again). With the
    same token, the second would get the first one's answer. A repeated request numbers its calls in the same way.
    """

    def __init__(self, _: str) -> None:
        self._calls: Counter[str] = Counter()

    def of_call(self, operation: str) -> str:
        """Return the token of the next call of an operation: this one, then others derived from it."""
        number = self._calls[operation]
        self._calls[operation] += 1
        return f"{self}/{number}" if number else str(self)


request_token: ContextVar[str | None] = ContextVar("agentlightning_request_token", default=None)
"""Idempotency token of the call in progress. The ids of created objects are derived from it, so a call that is
repeated with the same token is answered again, not carried out again. A `RequestToken` stands for several calls."""


def call_token(operation: str) -> str | None:
    """Return the token of the operation call that begins now, if it has one. Use it once for each call."""
    token = request_token.get()
    return token.of_call(operation) if isinstance(token, RequestToken) else token


class LightningStoreCapabilities(TypedDict, total=False):
    """Capabilities of a store; an absent key means no."""

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
    """Sets of resources, each counted once."""
    total_workers: int
    """Workers known to the store."""
    uptime: float
    """Seconds since the store was made."""
    total_span_bytes: int
    """Size of the spans in bytes."""
    eviction_threshold_bytes: int
    """Bytes of spans that the memory store never exceeds; it drops spans of ended rollouts."""
    safe_threshold_bytes: int
    """Bytes of spans that remain after spans were dropped."""
    memory_capacity_bytes: int
    """Bytes of memory that this process may use."""
    lease_seconds: float
    """Seconds without a heartbeat before a worker's claims are released."""
    retention: dict[str, float]
    """Limits that the `RetentionPolicy` sets; absent if everything is kept."""


_ELSEWHERE: Final[dict[str, str]] = {
    "collections": (
        "each operation is a transaction of its own, such as await store.update_resources(resources_id, resources); "
        "rules and storage meet in `Backend` and `Tx` (agentlightning/store/rules/tx.py)"
    ),
    "cancel_rollout": "call update_rollout(rollout_id, status='cancelled')",
}
"""Names that programs try, and the replacement for each."""

recording: set[asyncio.Task[None]] = set()
"""Metrics on their way to the store, see `record_metric`."""


class LightningStore:
    """The shared record of tasks, attempts, spans, resources, workers and runs."""

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
        """Capabilities of this store; none by default."""
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
        """Create a rollout with its first attempt (status `preparing`); it is never queued.

        `resources_id=None` uses the latest resources of the run, pinned at their version.
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

        Rollouts are claimed by highest `priority` first, then by longest availability. Nobody claims this one before
        `not_before` (wall-clock seconds).

        Raises:
            TypeError: `input` holds a value that is not JSON; names the place.
        """
        raise NotImplementedError

    @Operation("POST /queues/rollouts/enqueue", status=201, retry="token", whole=True)
    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
        """Enqueue a batch in order, all or none. An empty batch returns an empty list."""
        raise NotImplementedError

    @Operation(many="dequeue_many_rollouts")
    async def dequeue_rollout(
        self, worker_id: str | None = None, *, timeout: float = 0.0, run_id: str | None = None
    ) -> AttemptedRollout | None:
        """Claim the next queued rollout of the run, with a new attempt; None if there is none.

        Waits up to `timeout` seconds for one to arrive. A claim is a lease: it is released when a worker that has sent
        heartbeats stops sending them.
        """
        raise NotImplementedError

    @Operation("POST /queues/rollouts/dequeue", retry="token", whole=True)
    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None, timeout: float = 0.0, run_id: str | None = None
    ) -> list[AttemptedRollout]:
        """Claim up to `limit` rollouts, oldest first. Waits up to `timeout` seconds for the first of them."""
        raise NotImplementedError

    @Operation(
        "POST /rollouts/{rollout_id}/attempts",
        also=("POST /rollouts/{rollout_id}/attempt", "POST /rollouts/{rollout_id}/start"),
        status=201,
        retry="token",
        whole=True,
    )
    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        """Begin another attempt, whatever the rollout's status; besides queuing, the only way out of a terminal status.

        Raises:
            NotFoundError: no such rollout.
        """
        raise NotImplementedError

    # --- adding spans -----------------------------------------------------------------------------------------------

    @Operation("POST /spans", body="span", status=201, many="add_many_spans")
    async def add_span(self, span: Span) -> Span | None:
        """Store one span and return it; None if its (rollout, attempt, span id) exists already.

        A span counts as a heartbeat: it starts a `preparing` attempt and revives an `unresponsive` one. A span of an
        attempt that is no longer the latest is kept and marked `agentlightning.stale`.

        Raises:
            NotFoundError: no such rollout or attempt.
        """
        raise NotImplementedError

    @Operation("POST /spans/batch", status=201)
    async def add_many_spans(self, spans: Sequence[Span]) -> list[Span]:
        """Store spans in one step and return those that were new, in the given order.

        A span with `sequence_id` below 0 gets the next number of its rollout. A call that is repeated because its reply
        was lost may report that nothing was new.

        Raises:
            NotFoundError: a rollout or attempt is unknown; then nothing is stored.
        """
        raise NotImplementedError

    @Operation(kind="default")
    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: ReadableSpan, sequence_id: int | None = None
    ) -> Span | None:
        """Convert an ended OpenTelemetry span, store it and return the stored span, also if it existed already.

        The store numbers it if `sequence_id` is None. A request that is repeated because its reply was lost gets the
        same answer.
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
        """Return one number per (rollout, attempt) pair, in the given order."""
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
        """Change the given fields. Values are replaced, not merged.

        Raises:
            NotFoundError: no such rollout.
            ConflictError: the rollout has ended and `status` is neither the same nor `queuing`/`requeuing`.
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
        """Change the given fields; a new status of the latest attempt also changes the rollout's status.

        The store reads `reward` and `rewards` from spans; values given here replace them until a later span sets
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
        """Remove rollouts with their attempts and spans; return the number removed by this call (0 for a repeated one).

        Removes either the rollouts with the given ids (unknown ones are ignored), or the ended rollouts of each run, or
        of the given run, that exceed `keep_last` (a number), `max_age` (seconds since their end) or `max_bytes` (of
        spans); with a run and no bound, all its ended ones. `force` also removes given rollouts that have not ended.

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
        """Record a heartbeat of a worker, which renews the leases of its claims. Creates the worker if unknown.

        `attempts` names the attempts that the worker runs: only those leases are renewed, so a claim that the worker
        never received expires one lease after the claim. None, as from a client that names none, renews all.
        """
        raise NotImplementedError

    # --- resources --------------------------------------------------------------------------------------------------

    @Operation("POST /resources", body="resources", status=201, retry="token", whole=True)
    async def add_resources(self, resources: NamedResources, *, run_id: str | None = None) -> ResourcesUpdate:
        """Publish a new set of resources under a new id as version 1; it becomes the latest of its run."""
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

        `cursor` is that of an earlier page in the same order: the page begins after it, whatever was added or deleted
        meanwhile, and takes no longer to read than the first. A user's store may not support cursors.

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
        """Return the attempts of a rollout; an empty list for an unknown one."""
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
        """Return workers; notes of runs (`semconv.CONTROL_PREFIX`) only if `worker_id_contains` begins with that."""
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
        """Return the resources published last for the run, else the last ones of no run; None if there are none."""
        raise NotImplementedError

    # --- waiting ----------------------------------------------------------------------------------------------------

    @Operation("POST /waits/rollouts", whole=True)
    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        """Wait until all of the rollouts have ended or time is up; return those that have ended, in the given order.

        `timeout` is in seconds; None waits without limit. Unknown ids are ignored.
        """
        raise NotImplementedError

    @Operation("POST /events/search")
    async def query_events(
        self, *, after: str | None = None, limit: int = 100, timeout: float = 0.0, run_id: str | Unset | None = UNSET
    ) -> EventPage:
        """Return the rollouts and runs that changed after a cursor, each once in its present state.

        `after=None` is the moment of the call, "0" is before everything; any other cursor comes from an earlier page,
        of this or an earlier process. Waits up to `timeout` seconds for the first change. A page may be empty and have
        a newer cursor if all changes were of other runs.

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
        """Begin a run, or continue a known one: its state is `running`, and its end, error and stop note are cleared.

        Given values replace earlier ones.

        Raises:
            BadRequestError: the id is "-", begins with `semconv.CONTROL_PREFIX`, has a null byte or more than 512
                characters; or the run takes more than 8 MiB.
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
        """Change the given fields. A state other than `running` ends the run.

        `best` replaces a lower value of the same name, or one of another name. A `stop_reason` sets `stop_time`, which
        is later than any before, and creates an unknown run without an algorithm.

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
        """Store records, all or none; return the number of new ones. The call counts as a heartbeat of the run.

        A record with the kind, step and name of an existing one changes nothing. Numbers that are not finite become
        null, and the store sets the time.

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
        """Return records that pass every filter, by step and then in the order of storing; none of an unknown run.

        Both bounds of the step are inclusive. A page with a `limit` ends early if its records take more than 16 MiB.
        The next page of the same filters and order begins at its `cursor`, which every page but the last has.

        Raises:
            BadRequestError: an argument is wrong, the cursor is of another order, or it is given beside an `offset`.
        """
        raise keeps_no_runs(self)

    @Operation("POST /runs/{run_id}/rewind", kind="run", wrap="removed", retry="token", slow=True)
    async def rewind_run(self, run_id: str, step: int) -> int:
        """Remove the records of every kind after a step, for a run that continues there; return the number removed.

        Raises:
            NotFoundError: no such run.
        """
        raise keeps_no_runs(self)

    @Operation("POST /runs/delete", kind="run", wrap="deleted", retry="token", slow=True)
    async def delete_runs(self, run_ids: Sequence[str], *, force: bool = False) -> int:
        """Remove runs with their records; return the number removed. Unknown ones are ignored, rollouts stay.

        Raises:
            ConflictError: one is `running` and `force` is false; then nothing is removed.
        """
        raise keeps_no_runs(self)

    @Operation("POST /vocabularies/{vocabulary_id}", kind="run", body="tokens", wrap="added")
    async def add_vocabulary(self, vocabulary_id: str, tokens: Sequence[str]) -> bool:
        """Store the text of each token id of a tokenizer; return False if the vocabulary exists already and stays.

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
        """Return summaries of the rollouts that pass the filter, and their exact number.

        Rollouts without the sort value are last in both orders. `cursor` is that of an earlier page in the same order;
        the page after it stays correct while rollouts are added. `limit` is from 1 to 1000.

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

        `buckets` (at most 100) asks for a histogram of the rewards. `dimension` uses one dimension of the rewards
        instead of the reward.

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
        """Add a value to a histogram of the program, which the store's page of metrics shows (`/v1/prometheus`).

        A name always has the same tags. A repeated call counts again.

        Raises:
            BadRequestError: the name or a tag is invalid, the tags differ from earlier ones, or there are too many.
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
        """Return one span; None if unknown. If several traces have a span with this id, the lowest number wins.

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
        """Return the text of each token id in a vocabulary of `add_vocabulary`; None if there is no such vocabulary.

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
        """Import pieces of a finished history with their ids, times, statuses and numbers.

        Rollouts and attempts must have ended. The attempts of a rollout come in the order of their numbers, from 1 on,
        with their rollout or later; spans come with their attempt or later, each with its number. Existing data stays
        as it is, so a call may be repeated, and several may run at the same time. The answer names each piece that
        cannot be imported; the others are imported: a rollout with its attempts and spans at once, after the resources;
        many rollouts in several steps, between which other calls are served. Imported data is not claimed, retried, or
        counted as work of this store.

        An attempt without an outcome gets one: `scored` if it succeeded and one of its spans has a finite reward,
        `unscored` if it succeeded without one, else the default outcome of its status.

        Raises:
            BadRequestError: a value does not fit its field, or a span has no number.
            BusyError: the store is full. The resources were imported, and some rollouts of a long history.
            TooLargeError: a rollout with its attempts exceeds the size of one piece. The same parts were imported.
            NotImplementedError: this store does not support imports; those of this package do.
        """
        raise NotImplementedError(
            "This store does not implement import_history; import into one of this package, such as sqlite:///FILE"
        )

    # --- short forms, the same for every store ----------------------------------------------------------------------

    async def wait_for_rollout(self, rollout_id: str, timeout: float | None = None) -> Rollout | None:
        """Wait for one rollout and return it; None if it does not end in time."""
        finished = await self.wait_for_rollouts(rollout_ids=[rollout_id], timeout=timeout)
        return finished[0] if finished else None

    @Operation("POST /rollouts/{rollout_id}/attempt/{attempt_id}/finish", kind="short", retry="token")
    async def finish_attempt(
        self, rollout_id: str, attempt_id: str = "latest", *, status: AnyAttemptStatus = "succeeded"
    ) -> Attempt:
        """End an attempt; same as `update_attempt` with a status."""
        return await self.update_attempt(rollout_id, attempt_id, status=status)

    @Operation("POST /workers", kind="short", retry="token")
    async def register_worker(
        self, worker_id: str, heartbeat_stats: dict[str, Any] | Unset = UNSET, *, run_id: str | None = None
    ) -> Worker:
        """Register a worker before its first claim; same as its first heartbeat (`update_worker`)."""
        return await self.update_worker(worker_id, heartbeat_stats, run_id=run_id)

    @Operation("POST /rollouts/{rollout_id}/finish", kind="short", retry="token")
    async def finish_rollout(self, rollout_id: str, attempt_id: str = "latest", response: Any = None) -> Rollout:
        """End a rollout as succeeded; `response` goes to the attempt's metadata under the key `response`."""
        metadata: dict[str, Any] | Unset = UNSET if response is None else {"response": response}
        await self.update_attempt(rollout_id, attempt_id, status="succeeded", metadata=metadata)
        return await self._existing(rollout_id)

    async def fail_rollout(self, rollout_id: str, attempt_id: str = "latest", *, reason: str | None = None) -> Rollout:
        """End an attempt as failed, with a reason; the rollout fails or is queued again."""
        await self.update_attempt(
            rollout_id, attempt_id, status="failed", outcome="infrastructure_fault", outcome_reason=reason
        )
        return await self._existing(rollout_id)

    async def list_rollouts(
        self, options: FilterOptions | None = None, /, **filters: Any
    ) -> PaginatedResult[AttemptedRollout | Rollout]:
        """Same as `query_rollouts`; also accepts a `FilterOptions`."""
        return await self.query_rollouts(**(options or {}), **filters)

    async def _existing(self, rollout_id: str) -> Rollout:
        """Return a rollout whose attempt has just ended."""
        rollout = await self.get_rollout_by_id(rollout_id)
        if rollout is None:
            raise NotFoundError(f"Rollout {rollout_id} not found: it was deleted just after its attempt was ended")
        return rollout


def keeps_no_runs(store: object) -> NotImplementedError:
    """Return the error of a store that does not support runs."""
    return NotImplementedError(
        f"{type(store).__name__} keeps no runs: it does not implement the operations of "
        "agentlightning.store.base. Training goes on; to look at its records, use a store of this package"
    )
