"""LightningStore: the contract of every store. Implementations document only what differs.

Every operation is a coroutine, safe to repeat where it says so, and raises the classes of `agentlightning.errors`:
`NotFoundError` for acting on an unknown id, `ConflictError` for a change that the present state forbids,
`BadRequestError` for a wrong value. Getters answer None for an unknown id. Times are wall-clock seconds. The
operations that only read are in `read_operations.py`, `summary_operations.py` and `detail_operations.py`, those of
runs in `run_operations.py`, the one that takes in a history in `history_operations.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from opentelemetry.sdk.trace import ReadableSpan
from typing_extensions import TypedDict

from agentlightning.errors import NotFoundError
from agentlightning.store.detail_operations import DetailOperations
from agentlightning.store.history_operations import HistoryOperations
from agentlightning.store.read_operations import ReadOperations
from agentlightning.store.run_operations import RunOperations
from agentlightning.store.summary_operations import SummaryOperations
from agentlightning.store.traces import Traces
from agentlightning.store.unset import UNSET, Unset
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    AttemptError,
    EnqueueRolloutRequest,
    FilterOptions,
    NamedResources,
    Outcome,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutStatus,
    Span,
    TaskInput,
    Worker,
)
from agentlightning.types.core import AnyAttemptStatus, AnyRolloutStatus
from agentlightning.types.mode import AnyMode

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

T = TypeVar("T")


class LightningStore(ReadOperations, RunOperations, SummaryOperations, DetailOperations, HistoryOperations):
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

    async def statistics(self) -> LightningStoreStatistics:
        """Return the counters."""
        return {"name": type(self).__name__}

    # --- work comes in ---------------------------------------------------------------------------------------------

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

    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
        """Enqueue a batch, all or nothing, in order. An empty batch gives an empty list."""
        raise NotImplementedError

    async def dequeue_rollout(
        self, worker_id: str | None = None, *, timeout: float = 0.0, run_id: str | None = None
    ) -> AttemptedRollout | None:
        """Claim the next queued rollout of the run, with a new attempt; None if there is none.

        Waits up to `timeout` seconds for one to arrive. A claim is a lease: a worker that has sent heartbeats and then
        falls silent loses it.
        """
        raise NotImplementedError

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None, timeout: float = 0.0, run_id: str | None = None
    ) -> list[AttemptedRollout]:
        """Claim up to `limit` rollouts, oldest first; waits up to `timeout` seconds for the first of them."""
        raise NotImplementedError

    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        """Begin a further attempt whatever the rollout's status; the one way out of a terminal status besides queuing.

        Raises:
            NotFoundError: no such rollout.
        """
        raise NotImplementedError

    # --- evidence comes in -----------------------------------------------------------------------------------------

    async def add_span(self, span: Span) -> Span | None:
        """Store one span; None if its (rollout, attempt, span id) is there already.

        A span is a sign of life: it starts a `preparing` attempt and revives an `unresponsive` one. One that arrives
        for an attempt that is no longer the latest is kept and marked `agentlightning.stale`.

        Raises:
            NotFoundError: no such rollout or attempt.
        """
        raise NotImplementedError

    async def add_many_spans(self, spans: Sequence[Span]) -> list[Span]:
        """Store spans in one step and return those that were new, in the order given.

        A span with `sequence_id` below 0 is given the next number of its rollout. Who repeats the call because the
        reply was lost may be told that there was nothing new.

        Raises:
            NotFoundError: a rollout or attempt is unknown; then nothing is stored.
        """
        raise NotImplementedError

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: ReadableSpan, sequence_id: int | None = None
    ) -> Span | None:
        """Convert an ended OpenTelemetry span, store it and return what is stored, also where it was there already.

        It is numbered by the store when `sequence_id` is None. A request that is repeated because its reply was lost
        has the same answer.
        """
        raise NotImplementedError

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """Return the next number of the rollout, 1 first. Numbers never repeat; attempts of a rollout share them.

        Raises:
            NotFoundError: no such rollout.
        """
        raise NotImplementedError

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> list[int]:
        """Return one number per (rollout, attempt) pair, in the order given."""
        raise NotImplementedError

    # --- changes ---------------------------------------------------------------------------------------------------

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

    # --- resources -------------------------------------------------------------------------------------------------

    async def add_resources(self, resources: NamedResources, *, run_id: str | None = None) -> ResourcesUpdate:
        """Publish a new set of resources under a fresh id, version 1; it becomes the latest of its run."""
        raise NotImplementedError

    async def update_resources(
        self, resources_id: str, resources: NamedResources, *, run_id: str | None = None
    ) -> ResourcesUpdate:
        """Publish the next version of a set, which becomes the latest of its run; an unknown id begins at version 1."""
        raise NotImplementedError

    # --- short forms, the same for every store ---------------------------------------------------------------------

    async def wait_for_rollout(self, rollout_id: str, timeout: float | None = None) -> Rollout | None:
        """Wait for one rollout; None if it is not at an end in time."""
        finished = await self.wait_for_rollouts(rollout_ids=[rollout_id], timeout=timeout)
        return finished[0] if finished else None

    async def finish_attempt(
        self, rollout_id: str, attempt_id: str = "latest", *, status: AnyAttemptStatus = "succeeded"
    ) -> Attempt:
        """End an attempt; the same as `update_attempt` with a status."""
        return await self.update_attempt(rollout_id, attempt_id, status=status)

    async def register_worker(
        self, worker_id: str, heartbeat_stats: dict[str, Any] | Unset = UNSET, *, run_id: str | None = None
    ) -> Worker:
        """Make a worker known before its first claim; the same as its first heartbeat (`update_worker`)."""
        return await self.update_worker(worker_id, heartbeat_stats, run_id=run_id)

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
