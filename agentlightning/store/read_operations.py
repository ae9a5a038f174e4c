"""ReadOperations: the part of the contract that changes nothing: questions, and waits for changes; `LightningStore` has
it all."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Literal, TypeVar

from agentlightning.store.run_operations import SortOrder
from agentlightning.store.unset import UNSET, Unset
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    EventPage,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    Span,
    Worker,
)
from agentlightning.types.core import AnyRolloutStatus, AnyWorkerStatus

FilterLogic = Literal["and", "or"]
T = TypeVar("T")
PAGE = 500
"""Items of a list that are read at once."""


class ReadOperations:
    """What rollouts, attempts, spans, resources and workers a store has, and what becomes of them."""

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

    async def get_rollout_by_id(self, rollout_id: str) -> AttemptedRollout | Rollout | None:
        """Return one rollout, with its latest attempt if it has one; None if unknown."""
        raise NotImplementedError

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        """Return the attempt with the highest number; None if there is none."""
        raise NotImplementedError

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        """Return one worker; None if unknown."""
        raise NotImplementedError

    async def get_resources_by_id(self, resources_id: str, version: int | None = None) -> ResourcesUpdate | None:
        """Return one version of a set (the newest by default), API keys included; None if unknown."""
        raise NotImplementedError

    async def get_latest_resources(self, *, run_id: str | None = None) -> ResourcesUpdate | None:
        """Return what was published last for the run, else for no run; None if there is nothing."""
        raise NotImplementedError

    # --- waiting -----------------------------------------------------------------------------------------------------

    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout]:
        """Return those of the rollouts that are at an end, in the order given, waiting until all are or time is up.

        `timeout` is in seconds; None waits without limit. Unknown ids are left out and not waited for.
        """
        raise NotImplementedError

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


async def pages_of(
    query: Callable[..., Awaitable[PaginatedResult[T]]],
    *,
    limit: int | None = None,
    cursor: str | None = None,
    **filters: Any,
) -> AsyncGenerator[PaginatedResult[T]]:
    """Yield the pages of a list, `store.query_rollouts` for example; the first one even if it is empty.

    While others write, by cursors nothing is missing or read twice. A store that gives none is read by offsets.
    """
    where: dict[str, Any] = {} if cursor is None else {"cursor": cursor}
    while True:
        page = await query(**filters, limit=PAGE if limit is None else limit, **where)
        yield page
        if page.cursor is not None:
            where = {"cursor": page.cursor}
            continue
        read = where.get("offset", 0) + len(page.items)
        if "cursor" in where or not page.items or read >= page.total:
            return
        where = {"offset": read}
