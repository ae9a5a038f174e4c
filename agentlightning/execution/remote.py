"""How a process that serves runners of a remote algorithm follows the run: waits for the store, hears of the end.

One watch per process, beside its runners: it looks once a second whether the run is to end, logs when the store goes
away and comes back, and gives up after a stated outage. The runners themselves only claim and report. A SIGTERM that
the whole group of processes gets is left to the parent."""

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
from agentlightning.utils.backoff import OUTAGE_SECONDS, Outage
from agentlightning.utils.concurrency.loops import within
from agentlightning.utils.concurrency.main_thread import on_main_thread

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 2.0
"""A store that takes longer for one look is away."""
AWAY_LOOK_SECONDS = 0.2
"""How often to look for one that is away."""
REPORT_SECONDS = 5.0
"""How often the process says that it is there."""
LEAVE_SECONDS = 0.5
"""How long to try to say that this process ends."""
DEFAULT_OUTAGE_SECONDS = OUTAGE_SECONDS
"""How long the store may be away if the runner does not say (`store_unreachable_timeout`)."""


@dataclass
class RunWatch:
    """Watches a run from a process with remote runners. Owned by one event loop; `watch` is called once."""

    store: LightningStore
    where: str
    """How messages call the store: its address."""
    remote: RemoteRunners
    outage_seconds: float
    event: ExecutionEvent
    """Set when the run is to end."""
    heeds_old_notes: bool
    """End on a note that was there before this process. False where the store serves one run after another under the
    same name, so that an old note says nothing of the next run."""
    _baseline: StopNote | None = field(default=None, init=False)
    _met: bool = field(default=False, init=False)
    _outage: Outage = field(init=False)
    _reported: float = field(default=float("-inf"), init=False)

    def __post_init__(self) -> None:
        self._outage = Outage(self.outage_seconds)

    async def watch(self) -> None:
        """Return when the run is to end, with the event set, or when the store cannot tell.

        Raises:
            StoreUnreachableError: the store was away for `outage_seconds`, from the start or later.
            UnauthorizedError: it refuses the token.
        """
        while not self.event.is_set():
            began = time.monotonic()
            self._outage.expect(ANSWER_SECONDS)
            try:
                note = await within(ANSWER_SECONDS, self._look())
            except UnauthorizedError:
                raise
            except NotImplementedError:  # a store of the user's that keeps no workers: nothing can be told through it
                return
            except BusyError:
                note = None
            except (TimeoutError, OSError) as error:
                self._note_away(began, error)
                note = None
            else:
                if self._outage.tries:
                    logger.warning("The store at %s answers after %.0f s", self.where, self._outage.away)
                    self._reported = float("-inf")  # a store that was started anew may know nothing of this process
                self._outage.answered()
            if note is not None:
                logger.info("Told of the end of %s: %s", name_of_run(self.remote.run_id), note.reason)
                self.event.set()
                return
            pause = AWAY_LOOK_SECONDS if self._outage.tries else LOOK_SECONDS
            self._outage.expect(pause)
            await asyncio.sleep(pause)

    async def leave(self) -> None:
        """Say that this process ends, so that the end of the run does not wait for it. Never raises."""
        if self._met and not self._outage.tries:
            try:
                await within(LEAVE_SECONDS, self.remote.report(self.store, told=True))
            except Exception as error:  # the end of the run waits a little longer
                logger.debug("Could not say that this process ends: %s", error)

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
            state = "does not answer any more" if self._met else "does not answer yet"
            logger.warning("The store at %s %s; waiting up to %g s", self.where, state, self.outage_seconds)
        if self._outage.failed(began):
            raise StoreUnreachableError(
                f"No answer from the store at {self.where} for {self._outage.away:.0f} s "
                f"(store_unreachable_timeout={self.outage_seconds:g}; last: {type(error).__name__}: {error}). "
                "Is the algorithm running there, and may this machine reach the port?"
            ) from error


async def until_known(remote: RemoteRunners, store: LightningStore, event: ExecutionEvent) -> None:
    """Return once the watch of `remote`, here or in the parent, has met the store, or the event is set."""
    while not event.is_set():
        try:
            if await within(ANSWER_SECONDS, remote.is_known(store)):
                return
        except NotImplementedError:
            return
        except (TimeoutError, OSError):  # the watch tells, and has the limit
            pass
        await asyncio.sleep(AWAY_LOOK_SECONDS / 2)


async def heed(store: LightningStore, run_id: str | None, event: ExecutionEvent, is_open: ExecutionEvent) -> None:
    """Set the event once a note says that the run of this process is to end; a store that is away is ignored.

    The algorithm opens its run as its first step, and a note from before that says nothing.
    """
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        if not is_open.is_set():
            continue
        try:
            note = await stop_note(store, run_id, told_only=True)
        except NotImplementedError:  # a store of the user's that keeps no runs
            return
        except Exception as error:  # whoever works with the store meets the same, and has a say in it
            logger.debug("Could not look whether %s is to end: %s", name_of_run(run_id), error)
            continue
        if note is not None:
            logger.warning("Ending %s: %s", name_of_run(run_id), note.reason)
            event.set()
            return


PARENT_SECONDS = 1.0
"""How long the parent, which gets the same signal, may take to set the event."""
TWICE_SECONDS = 3.0
"""Within this time of a signal to the whole group, one that the subreaper passes on is no second request."""


@contextlib.asynccontextmanager
async def term_left_to_parent(event: ExecutionEvent) -> AsyncGenerator[None]:
    """Let SIGTERM end this child process only if the event is not set within a second; in no child, do nothing.

    Whoever takes a machine away signals every process of a service. The parent answers by setting the event, and
    ends by force what does not heed it.
    """
    if multiprocessing.parent_process() is None or sys.platform == "win32":  # where SIGTERM ends a process at once
        yield
        return
    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    is_left, first = True, float("inf")

    def on_term(signum: int, frame: FrameType | None) -> None:
        nonlocal first
        first = min(first, time.monotonic())
        if is_left and time.monotonic() - first < TWICE_SECONDS:
            loop.call_soon_threadsafe(asked.set)
        else:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    async def decide() -> None:
        nonlocal is_left
        await asked.wait()
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
