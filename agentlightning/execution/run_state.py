"""The state of a run in its store: whether it is to end, which every process of the run reads, and how it ended.

A run is to end when somebody has told it to, and when its algorithm has ended. A process that serves runners away from
the algorithm has a row among the store's workers, with an id that begins with `CONTROL_PREFIX`, so that the end of a
run can wait until all of them were told. Lists of workers leave these rows out.
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
"""How often a process of a run looks whether the run is to end."""
SILENT_SECONDS = 15.0
"""A process with remote runners that has not looked for this long is taken for gone."""
HAS_ENDED = "its algorithm has ended"
_TELL_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class StopNote:
    """Says that a run is to end."""

    reason: str
    stamp: float
    """Since when, by the clock of the store; no two notes of a run have the same."""


async def stop_run(store: LightningStore, run_id: str | None, *, reason: str = "it was told to stop") -> StopNote:
    """Tell every process of a run to end: its algorithm, and runners wherever they are. Again is harmless.

    They look about once a second. A run is begun anew by starting its algorithm.

    Raises:
        NotImplementedError: the store keeps no runs.
    """
    run = await complete(store).update_run(run_id or "", stop_reason=reason)
    return StopNote(reason, run.stop_time or 0.0)


async def stop_note(store: LightningStore, run_id: str | None, *, told_only: bool = False) -> StopNote | None:
    """Return what ends the run; None while it may go on, and before it is known.

    `told_only`: the end of an algorithm is none, for the algorithm itself, which may have been started twice.
    """
    run = await complete(store).get_run_by_id(run_id or "")
    if run is None:
        return None
    if run.stop_reason is not None:
        return StopNote(run.stop_reason, run.stop_time or 0.0)
    return None if told_only or run.state == "running" else StopNote(HAS_ENDED, run.end_time or 0.0)


def name_of_run(run_id: str | None) -> str:
    """Return how messages call the run."""
    return f"run {run_id}" if run_id else "the run without a name"


# --- processes that serve runners away from the algorithm ------------------------------------------------------------


@dataclass(frozen=True)
class RemoteRunners:
    """A process that serves runners of a run and does not run its algorithm."""

    run_id: str | None
    name: str
    """Unique among all machines."""
    n_runners: int

    async def report(self, store: LightningStore, *, told: bool = False) -> None:
        """Say that this process is there and, once it knows that the run ends, that it was told."""
        stats = {"run": self.run_id, "runners": self.n_runners, "told": told}
        await store.update_worker(self._row_id, stats)

    async def is_known(self, store: LightningStore) -> bool:
        """True once the store knows of this process, so that the end of the run waits for it."""
        return await store.get_worker_by_id(self._row_id) is not None

    @property
    def _row_id(self) -> str:
        return f"{CONTROL_PREFIX}runners:{self.name}"


async def remote_runners(store: LightningStore, run_id: str | None) -> list[Worker]:
    """Return the rows of the processes with remote runners that a run has ever had."""
    rows = await store.query_workers(worker_id_contains=f"{CONTROL_PREFIX}runners:")
    return [row for row in rows if row.heartbeat_stats is not None and row.heartbeat_stats.get("run") == run_id]


async def are_served_elsewhere(store: LightningStore, run_id: str | None) -> bool:
    """True while a process with remote runners serves the run."""
    try:
        rows = await remote_runners(store, run_id)
    except NotImplementedError:  # a store of the user's that keeps no workers
        return False
    now = StopNote("", time.time())
    return any(_lives(row, now) and not (row.heartbeat_stats or {}).get("told") for row in rows)


async def until_told(
    store: LightningStore, run_id: str | None, note: StopNote, *, seconds: float, all_are_away: bool
) -> None:
    """Wait up to `seconds` until each process with remote runners of a run that is alive has taken note of its end.

    `all_are_away` says that no runner lives beside the algorithm: then every worker is remote, and a process
    that has just come is waited for.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        rows = [row for row in await remote_runners(store, run_id) if _lives(row, note)]
        told = all((row.heartbeat_stats or {}).get("told") for row in rows)
        known = sum(int((row.heartbeat_stats or {}).get("runners", 0)) for row in rows)
        if told and not all_are_away:
            return
        if told:
            workers = [row for row in await store.query_workers() if not row.worker_id.startswith(CONTROL_PREFIX)]
            if sum(row.run_id == run_id and _lives(row, note) for row in workers) <= known:
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
    """Write down how a run ended and return it.

    None is a run without a result: `failed` with an error, `stopped` if it was told to, else `interrupted`.
    """
    whole = complete(store)
    if error is not None and state != "interrupted":
        return await whole.update_run(run_id or "", state="failed", error=describe(readable(error)))
    if state is None:
        run = await whole.get_run_by_id(run_id or "")
        state = "interrupted" if run is None or run.stop_reason is None else "stopped"
    return await whole.update_run(run_id or "", state=state, error=UNSET)
