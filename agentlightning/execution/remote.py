"""The watch of a process with runners of a remote algorithm: it waits for the store, and for the end of the run.

Each process has one watch: it checks once a second whether the run has to end, logs when the store becomes unreachable
and reachable, and gives up after a configured outage. The runners only claim and report.
The parent handles a SIGTERM to the whole process group."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from types import FrameType

from agentlightning.errors import BusyError, StoreUnreachableError, UnauthorizedError
from agentlightning.execution.events import ExecutionEvent
from agentlightning.execution.run_state import LOOK_SECONDS, RemoteRunners, StopNote, name_of_run, stop_note
from agentlightning.execution.supervisor import until_set
from agentlightning.store.base import LightningStore
from agentlightning.utils.backoff import Outage
from agentlightning.utils.concurrency.loops import within
from agentlightning.utils.concurrency.main_thread import on_main_thread

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 2.0
"""Seconds for one check; a store that takes longer counts as unreachable."""
AWAY_LOOK_SECONDS = 0.2
"""Seconds between checks of an unreachable store."""
REPORT_SECONDS = 5.0
"""Seconds between heartbeats of this process."""
LEAVE_SECONDS = 0.5
"""Seconds for the report that this process ends."""


@dataclass
class RunWatch:
    """Watches a run from a process with remote runners. Owned by one event loop; `watch` is called once."""

    store: LightningStore
    where: str
    """The store's address, for messages."""
    remote: RemoteRunners
    outage_seconds: float
    event: ExecutionEvent
    """Set when the run is to end."""
    heeds_old_notes: bool
    """True to obey a stop note that is older than this process. False if the store serves several runs in turn with
    the same name, so that an old note does not stop the next run."""
    _baseline: StopNote | None = field(default=None, init=False)
    _met: bool = field(default=False, init=False)
    _outage: Outage = field(init=False)
    _reported: float = field(default=float("-inf"), init=False)

    def __post_init__(self) -> None:
        self._outage = Outage(self.outage_seconds)

    async def watch(self) -> None:
        """Set the event and return when the run has to end; also return if the store does not support stop notes.

        Raises:
            StoreUnreachableError: the store was unreachable for `outage_seconds`, from the start or later.
            UnauthorizedError: the store rejects the token.
        """
        while not self.event.is_set():
            began = time.monotonic()
            self._outage.expect(ANSWER_SECONDS)
            try:
                note = await within(ANSWER_SECONDS, self._look())
            except UnauthorizedError:
                raise
            except NotImplementedError:  # a user's store without workers: it carries no notes
                return
            except BusyError:
                note = None
            except (TimeoutError, OSError) as error:
                self._note_away(began, error)
                note = None
            else:
                if self._outage.tries:
                    logger.warning("The store at %s responds after %.0f s", self.where, self._outage.away)
                    self._reported = float("-inf")  # a restarted store may not know this process
                self._outage.answered()
            if note is not None:
                logger.info("Ending %s: %s", name_of_run(self.remote.run_id), note.reason)
                self.event.set()
                return
            pause = AWAY_LOOK_SECONDS if self._outage.tries else LOOK_SECONDS
            self._outage.expect(pause)
            await asyncio.sleep(pause)

    async def leave(self) -> None:
        """Report that this process ends, so that the end of the run does not wait for it. Never raises."""
        if self._met and not self._outage.tries:
            try:
                await within(LEAVE_SECONDS, self.remote.report(self.store, told=True))
            except Exception as error:  # the end of the run then waits a little longer
                logger.debug("Could not report that this process ends: %s", error)

    async def _look(self) -> StopNote | None:
        note = await stop_note(self.store, self.remote.run_id)
        if not self._met and not self.heeds_old_notes:
            self._baseline = note
        self._met = True
        if note is not None and note != self._baseline:
            await self.remote.report(self.store, told=True)
            return note
        if time.monotonic() - self._reported >= REPORT_SECONDS:
            await self.remote.report(self.store)
            self._reported = time.monotonic()
        return None

    def _note_away(self, began: float, error: BaseException) -> None:
        if not self._outage.tries:
            state = "has stopped responding" if self._met else "does not respond yet"
            logger.warning("The store at %s %s; waiting up to %g s", self.where, state, self.outage_seconds)
        if self._outage.failed(began):
            raise StoreUnreachableError(
                f"No response from the store at {self.where} for {self._outage.away:.0f} s "
                f"(store_unreachable_timeout={self.outage_seconds:g}; last: {type(error).__name__}: {error}). "
                "Check that the algorithm runs there and that this machine can reach the port."
            ) from error


async def until_known(remote: RemoteRunners, store: LightningStore, event: ExecutionEvent) -> None:
    """Return once the watch of `remote`, here or in the parent, has reached the store, or once the event is set."""
    while not event.is_set():
        try:
            if await within(ANSWER_SECONDS, remote.is_known(store)):
                return
        except NotImplementedError:
            return
        except (TimeoutError, OSError):  # the watch reports it, and has the time limit
            pass
        await asyncio.sleep(AWAY_LOOK_SECONDS / 2)


async def heed(store: LightningStore, run_id: str | None, event: ExecutionEvent, is_open: ExecutionEvent) -> None:
    """Set the event once a stop note ends this process's run. An unreachable store is ignored.

    The algorithm opens its run as its first step; earlier notes are ignored.
    """
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        if not is_open.is_set():
            continue
        try:
            note = await stop_note(store, run_id, told_only=True)
        except NotImplementedError:  # a user's store without runs
            return
        except Exception as error:  # the callers that use the store get the same error and handle it
            logger.debug("Could not check whether %s has to end: %s", name_of_run(run_id), error)
            continue
        if note is not None:
            logger.warning("Ending %s: %s", name_of_run(run_id), note.reason)
            event.set()
            return


PARENT_SECONDS = 1.0
"""Seconds that the parent, which gets the same signal, may take to set the event."""
TWICE_SECONDS = 3.0
"""Seconds after a signal to the process group during which one from the subreaper is not a second request."""


@contextlib.asynccontextmanager
async def term_left_to_parent(event: ExecutionEvent) -> AsyncGenerator[None]:
    """Let SIGTERM end this child process only if the event is not set within a second. No effect outside a child.

    A service manager that stops a machine sends the signal to every process. The parent then sets the event, and kills
    processes that ignore it.
    """
    if multiprocessing.parent_process() is None or sys.platform == "win32":  # on Windows SIGTERM ends a process at once
        yield
        return
    loop, terminated = asyncio.get_running_loop(), asyncio.Event()
    is_left, first = True, float("inf")

    def on_term(signum: int, frame: FrameType | None) -> None:
        nonlocal first
        first = min(first, time.monotonic())
        if is_left and time.monotonic() - first < TWICE_SECONDS:
            loop.call_soon_threadsafe(terminated.set)
        else:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    async def decide() -> None:
        nonlocal is_left
        await terminated.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(until_set(event, 0.02), PARENT_SECONDS)
        if not event.is_set():
            is_left = False
            os.kill(os.getpid(), signal.SIGTERM)

    await on_main_thread(lambda: signal.signal(signal.SIGTERM, on_term))
    deciding = asyncio.create_task(decide())
    try:
        yield
    finally:
        is_left = False
        deciding.cancel()
