"""The state of a run in its store: whether it is to end, which every process of the run reads, and how it ended.

A run is to end when somebody has told it to, and when its algorithm has ended. A process that serves runners away from
the algorithm has a row among the store's workers, with an id that begins with `CONTROL_PREFIX`, so that the end of a
run can wait until all of them were told. Lists of workers leave these rows out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from agentlightning.errors import NotFoundError
from agentlightning.execution.base import AlgorithmBundle, RunnerBundle
from agentlightning.execution.events import ExecutionEvent, ThreadingEvent
from agentlightning.runner.outcome import describe
from agentlightning.semconv import CONTROL_PREFIX
from agentlightning.store.base import UNSET, LightningStore
from agentlightning.store.wrappers import complete
from agentlightning.types import Worker
from agentlightning.types.runs import Run, RunState
from agentlightning.utils.concurrency.loops import within
from agentlightning.utils.exceptions import readable

logger = logging.getLogger(__name__)

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


TELL_SECONDS = 5.0
"""How long the end of a run waits for remote runners to take note of it."""
HASTY_TELL_SECONDS = 0.5
"""The same after Ctrl+C."""
_WRITE_SECONDS = 2.0
"""The store has at least so long to write down how a run ended."""


def run_of(bundle: AlgorithmBundle | RunnerBundle) -> str | None:
    """Return the run of a bundle, if it has one."""
    return getattr(bundle, "run_id", None)


@dataclass
class OpenedRun:
    """An algorithm that opens its run first, and whose end is written down."""

    algorithm: AlgorithmBundle
    done: ThreadingEvent = field(default_factory=ThreadingEvent)
    """Set once the run is open; a note counts from then on."""
    has_returned: bool = False
    """True once the algorithm has given its result."""

    async def open(self, store: LightningStore) -> None:
        """Open the run. Again is harmless. Before runners can see the store, where it is served from here."""
        if not self.done.is_set():
            own: Callable[[LightningStore], Any] | None = getattr(self.algorithm, "open_run", None)
            with contextlib.suppress(NotImplementedError):  # a store of the user's that keeps no runs
                if own is not None:
                    await own(store)
                else:
                    await complete(store).start_run(run_of(self.algorithm) or "")
            self.done.set()

    async def __call__(self, store: LightningStore, event: ExecutionEvent) -> Any:
        """Open the run and run the algorithm."""
        await self.open(store)
        result = await self.algorithm(store, event)
        self.has_returned = True
        return result

    @contextlib.asynccontextmanager
    async def ending(
        self, store: LightningStore, interrupted: Callable[[], bool], *, all_are_away: bool = False
    ) -> AsyncGenerator[None]:
        """Write down how the run ended when the body has ended, and tell remote runners, if there are or may be any.

        `interrupted` is asked at the end: whether Ctrl+C or SIGTERM ended it. `all_are_away`: see `until_told`. Never
        raises: the run is over.
        """
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:  # handed on below
            error = raised
            raise
        finally:
            was_interrupted = interrupted() or isinstance(error, (asyncio.CancelledError, KeyboardInterrupt))
            seconds = HASTY_TELL_SECONDS if was_interrupted else TELL_SECONDS
            await self._end(store, error, seconds, was_interrupted=was_interrupted, all_are_away=all_are_away)

    async def _end(
        self,
        store: LightningStore,
        error: BaseException | None,
        seconds: float,
        *,
        was_interrupted: bool,
        all_are_away: bool,
    ) -> None:
        run_id = run_of(self.algorithm)
        try:
            state: RunState | None = "interrupted" if was_interrupted else "succeeded" if self.has_returned else None
            run = await within(max(seconds, _WRITE_SECONDS), end_run(store, run_id, state, error))
            note = StopNote(HAS_ENDED, max(run.end_time or 0.0, run.stop_time or 0.0))
            if all_are_away or await within(seconds, remote_runners(store, run_id)):
                telling = until_told(store, run_id, note, seconds=seconds, all_are_away=all_are_away)
                await within(seconds + 1.0, telling)
        except (NotImplementedError, NotFoundError):  # a store that keeps no runs; a run that was deleted meanwhile
            return
        except Exception as failure:  # the run is over, whether the store and remote runners know or not
            logger.warning("The end of %s could not be written down or told: %r", name_of_run(run_id), failure)


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
