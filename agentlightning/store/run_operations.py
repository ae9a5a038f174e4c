"""RunOperations: the part of the contract that keeps runs, their records and vocabularies; `LightningStore` has it all.

The run without a name, whose `run_id` is None elsewhere, has the id "" here, and "-" in the path of a URL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from agentlightning.store.unset import UNSET, Unset
from agentlightning.types import AttemptError, BestFigure, PaginatedResult, RecordKind, Run, RunRecord, RunState

SortOrder = Literal["asc", "desc"]


class RunOperations:
    """Runs and what they write down. A store may lack all of it: each operation then raises `NotImplementedError`."""

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

    async def get_run_by_id(self, run_id: str) -> Run | None:
        """Return one run; None if unknown."""
        raise keeps_no_runs(self)

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

    async def rewind_run(self, run_id: str, step: int) -> int:
        """Remove the records of every kind after a step, for a run that goes on from there; returns how many.

        Raises:
            NotFoundError: no such run.
        """
        raise keeps_no_runs(self)

    async def delete_runs(self, run_ids: Sequence[str], *, force: bool = False) -> int:
        """Remove runs with their records; returns how many. Unknown ones are passed over, rollouts stay.

        Raises:
            ConflictError: one is `running`; then nothing is removed, unless with `force`.
        """
        raise keeps_no_runs(self)

    async def add_vocabulary(self, vocabulary_id: str, tokens: Sequence[str]) -> bool:
        """Store the text of each token id of a tokenizer; False if there is one of this id, which then stays.

        Raises:
            BadRequestError: it takes more than 8 MiB of JSON.
        """
        raise keeps_no_runs(self)

    async def get_vocabulary(self, vocabulary_id: str) -> list[str] | None:
        """Return the text of each token id; None if unknown."""
        raise keeps_no_runs(self)


def keeps_no_runs(store: object) -> NotImplementedError:
    """Return the error of a store that lacks these operations."""
    return NotImplementedError(
        f"{type(store).__name__} keeps no runs: it does not implement the operations of "
        "agentlightning.store.run_operations. Training goes on; to look at its records, use a store of this package"
    )
