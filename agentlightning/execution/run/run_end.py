"""How the end of a run is written into its store, in whichever way it ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from agentlightning.errors import NotFoundError
from agentlightning.execution.base import AlgorithmBundle, RunnerBundle
from agentlightning.execution.events import ExecutionEvent, ThreadingEvent
from agentlightning.execution.run.stop_note import HAS_ENDED, StopNote, name_of_run, remote_runners, until_told
from agentlightning.runner.outcome import describe
from agentlightning.store.base import UNSET, LightningStore
from agentlightning.store.wrappers import complete
from agentlightning.types.runs import Run, RunState
from agentlightning.utils.concurrency.loops import within
from agentlightning.utils.exceptions import readable

logger = logging.getLogger(__name__)

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
