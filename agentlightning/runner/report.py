"""The last word of an attempt: how it ended, told to the store and to the log."""

from __future__ import annotations

import asyncio
import logging
import random
import time

from agentlightning.errors import BusyError, ConflictError
from agentlightning.runner.outcome import Ending, agents_part
from agentlightning.store.base import LightningStore
from agentlightning.types import AttemptedRollout
from agentlightning.utils.within import within

logger = logging.getLogger(__name__)

REPORT_SECONDS = 30.0
CANCELLED_REPORT_SECONDS = 1.0
"""When the runner is being stopped, which has a bound of its own."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0


async def report(store: LightningStore, rollout: AttemptedRollout, ending: Ending, prefix: str) -> None:
    """Tell the store how the attempt ended, again while the store is away.

    Never raises: what cannot be told is an error in the log, and the lease of the attempt runs out.
    """
    deadline = time.monotonic() + (CANCELLED_REPORT_SECONDS if ending.stops_runner else REPORT_SECONDS)
    pause = _FIRST_PAUSE
    while True:
        try:
            await within(max(deadline - time.monotonic(), 0.01), _update(store, rollout, ending))
            return
        except ConflictError as error:
            logger.warning("%s ended meanwhile: %s", prefix, error)
            return
        except (OSError, BusyError, asyncio.TimeoutError) as error:
            if time.monotonic() + pause >= deadline:
                return _log_untold(rollout, ending, prefix, error)
        except Exception as error:  # refused: nothing that a repetition could mend
            return _log_untold(rollout, ending, prefix, error)
        await asyncio.sleep(pause * random.uniform(0.75, 1.25))
        pause = min(pause * 2, _LONGEST_PAUSE)


def log_failure(ending: Ending, prefix: str) -> None:
    """Log an attempt that failed; with the traceback where somebody must act."""
    cause = ending.cause
    if cause is None:
        return
    serious = ending.outcome == "infrastructure_fault"
    logger.log(
        logging.ERROR if serious else logging.INFO,
        "%s attempt failed as %s (%s): %s: %s",
        prefix,
        ending.outcome,
        ending.reason,
        type(cause).__name__,
        cause,
        exc_info=(type(cause), cause, agents_part(cause)) if serious and ending.reason == "exception" else None,
    )


async def _update(store: LightningStore, rollout: AttemptedRollout, ending: Ending) -> None:
    await store.update_attempt(
        rollout.rollout_id,
        rollout.attempt.attempt_id,
        status=ending.status,
        outcome=ending.outcome,
        outcome_reason=ending.reason,
        error=ending.error,
    )


def _log_untold(rollout: AttemptedRollout, ending: Ending, prefix: str, error: BaseException) -> None:
    logger.error(
        "%s the end of attempt %s (%s) could not be stored: %s: %s. Its lease will run out.",
        prefix,
        rollout.attempt.attempt_id,
        ending.outcome,
        type(error).__name__,
        error,
    )
