"""The state of a run in its store: its end, and the stop note that every process of the run reads.

A run has to end when it is stopped (`stop_run`) or when its algorithm has ended. A process with remote runners has a
row among the store's workers, with an id that begins with `CONTROL_PREFIX`, so that the end of a run can wait until
each of them has detected it. Lists of workers omit these rows.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from agentlightning.execution.base import AlgorithmBundle, RunnerBundle
from agentlightning.runner.outcome import describe
from agentlightning.semconv import CONTROL_PREFIX
from agentlightning.store.base import UNSET, LightningStore
from agentlightning.store.wrappers import complete
from agentlightning.types import Worker
from agentlightning.types.runs import Run, RunState
from agentlightning.utils.exceptions import readable

LOOK_SECONDS = 1.0
"""Seconds between a process's checks for the end of its run."""
SILENT_SECONDS = 15.0
"""Seconds without a heartbeat after which a process with remote runners counts as ended."""
HAS_ENDED = "its algorithm has ended"
_TELL_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class StopNote:
    """A request that a run ends."""

    reason: str
    stamp: float
    """Time of the note by the store's clock, in Unix seconds; unique within a run."""


async def stop_run(store: LightningStore, run_id: str | None, *, reason: str = "a stop was requested") -> StopNote:
    """Request every process of a run to end: its algorithm, and runners on all machines. May be called again.

    The processes check about once a second. To continue the run, start its algorithm again.

    Raises:
        NotImplementedError: the store does not support runs.
    """
    run = await complete(store).update_run(run_id or "", stop_reason=reason)
    return StopNote(reason, run.stop_time or 0.0)


async def stop_note(store: LightningStore, run_id: str | None, *, told_only: bool = False) -> StopNote | None:
    """Return the stop note of the run; None while the run may continue, and before the store knows it.

    With `told_only`, the end of the algorithm is ignored: for the algorithm itself, which may have been started twice.
    """
    run = await complete(store).get_run_by_id(run_id or "")
    if run is None:
        return None
    if run.stop_reason is not None:
        return StopNote(run.stop_reason, run.stop_time or 0.0)
    return None if told_only or run.state == "running" else StopNote(HAS_ENDED, run.end_time or 0.0)


def name_of_run(run_id: str | None) -> str:
    """Return the name of the run for messages."""
    return f"run {run_id}" if run_id else "the run without a name"


# --- processes with remote runners -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RemoteRunners:
    """A process that has runners of a run and does not run its algorithm."""

    run_id: str | None
    name: str
    """Name of the process, unique among all machines."""
    n_runners: int

    async def report(self, store: LightningStore, *, told: bool = False) -> None:
        """Report that this process is alive and, with `told`, that it has detected the end of the run."""
        stats = {"run": self.run_id, "runners": self.n_runners, "told": told}
        await store.update_worker(self._row_id, stats)

    async def is_known(self, store: LightningStore) -> bool:
        """Return whether the store knows this process, so that the end of the run waits for it."""
        return await store.get_worker_by_id(self._row_id) is not None

    @property
    def _row_id(self) -> str:
        return f"{CONTROL_PREFIX}runners:{self.name}"


async def remote_runners(store: LightningStore, run_id: str | None) -> list[Worker]:
    """Return the rows of all processes with remote runners of a run, including those that have ended."""
    rows = await store.query_workers(worker_id_contains=f"{CONTROL_PREFIX}runners:")
    return [row for row in rows if row.heartbeat_stats is not None and row.heartbeat_stats.get("run") == run_id]


async def are_served_elsewhere(store: LightningStore, run_id: str | None) -> bool:
    """Return whether a live process with remote runners serves the run."""
    try:
        rows = await remote_runners(store, run_id)
    except NotImplementedError:  # a user's store without workers
        return False
    now = StopNote("", time.time())
    return any(_lives(row, now) and not (row.heartbeat_stats or {}).get("told") for row in rows)


async def until_told(
    store: LightningStore, run_id: str | None, note: StopNote, *, seconds: float, all_are_away: bool
) -> None:
    """Wait up to `seconds` until each live process with remote runners has detected the end of the run.

    `all_are_away` means that no runner is local. Every worker is then remote, and this function also waits for a
    process that has just started.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        rows = [row for row in await remote_runners(store, run_id) if _lives(row, note)]
        all_notified = all((row.heartbeat_stats or {}).get("told") for row in rows)
        n_runners = sum(int((row.heartbeat_stats or {}).get("runners", 0)) for row in rows)
        if all_notified and not all_are_away:
            return
        if all_notified:
            workers = [row for row in await store.query_workers() if not row.worker_id.startswith(CONTROL_PREFIX)]
            if sum(row.run_id == run_id and _lives(row, note) for row in workers) <= n_runners:
                return
        await asyncio.sleep(_TELL_POLL_SECONDS)


def _lives(row: Worker, note: StopNote) -> bool:
    return note.stamp - max(row.last_heartbeat_time or 0.0, row.last_dequeue_time or 0.0) < SILENT_SECONDS


def run_of(bundle: AlgorithmBundle | RunnerBundle) -> str | None:
    """Return the run of a bundle, if it has one."""
    return getattr(bundle, "run_id", None)


async def end_run(
    store: LightningStore, run_id: str | None, state: RunState | None, error: BaseException | None = None
) -> Run:
    """Record the end of a run and return it.

    With None, the run has no result: it is `failed` with an error, `stopped` if it was stopped, else `interrupted`.
    """
    whole = complete(store)
    if error is not None and state != "interrupted":
        return await whole.update_run(run_id or "", state="failed", error=describe(readable(error)))
    if state is None:
        run = await whole.get_run_by_id(run_id or "")
        state = "interrupted" if run is None or run.stop_reason is None else "stopped"
    return await whole.update_run(run_id or "", state=state, error=UNSET)
