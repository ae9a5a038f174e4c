"""How an attempt ended, reported to the store and to the log; with the reason `budget` where that is why it ended.

The gateway refuses every further call once the budget of a rollout is used up, with a code that most client libraries
pass on in their error. Where a library hides it, the gateway's record of the attempt's last call says so."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from typing import Any

from agentlightning.adapter.spans.tokens import RAW_SPAN
from agentlightning.errors import ConflictError
from agentlightning.runner.outcome import Ending, agents_part
from agentlightning.semconv import BUDGET_EXHAUSTED, LightningCallAttributes
from agentlightning.store.base import LightningStore, request_token
from agentlightning.types import AttemptedRollout
from agentlightning.utils.backoff import retry_for
from agentlightning.utils.id import generate_id

logger = logging.getLogger(__name__)

CANCELLED_REPORT_SECONDS = 1.0
"""When the runner is being stopped, which has a bound of its own."""


async def report(
    store: LightningStore, rollout: AttemptedRollout, ending: Ending, prefix: str, *, seconds: float
) -> None:
    """Tell the store how the attempt ended, again while the store does not answer, for `seconds` at most.

    Never raises: what cannot be reported is logged as an error; the caller releases the attempt, whose lease runs out.
    """
    seconds = CANCELLED_REPORT_SECONDS if ending.stops_runner else seconds
    token = generate_id(32)  # of all tries: whichever of them arrives first is the one that counts

    async def update() -> None:
        request_token.set(token)  # within a task of its own
        await store.update_attempt(
            rollout.rollout_id,
            rollout.attempt.attempt_id,
            status=ending.status,
            outcome=ending.outcome,
            outcome_reason=ending.reason,
            error=ending.error,
        )

    try:
        await retry_for(seconds, update, f"{prefix} the end of an attempt")
    except ConflictError as error:
        logger.warning("%s ended meanwhile: %s", prefix, error)
    except Exception as error:  # not answered in time; or refused, which no repetition could mend
        logger.error(
            "%s the end of attempt %s (%s) could not be stored: %s: %s. Its lease will run out.",
            prefix,
            rollout.attempt.attempt_id,
            ending.outcome,
            type(error).__name__,
            error,
        )


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
        cause if ending.error is None else ending.error.message,
        exc_info=(type(cause), cause, agents_part(cause)) if serious and ending.reason == "exception" else None,
    )


_ERROR_CODE = LightningCallAttributes.ERROR_CODE.value


async def with_budget_reason(ending: Ending, store: LightningStore, rollout: AttemptedRollout) -> Ending:
    """Return the ending of an attempt that was left by an exception, with the reason `budget` if that is why."""
    if ending.reason != "exception" or ending.cause is None:
        return ending
    waiting, seen = [ending.cause], set[int]()
    while waiting:  # the exception, those that led to it and those that are grouped in it, each once
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        with contextlib.suppress(Exception):  # a broken __str__ of the user's
            if getattr(each, "code", None) == BUDGET_EXHAUSTED or BUDGET_EXHAUSTED in str(each):
                return replace(ending, reason="budget")
        grouped: Any = getattr(each, "exceptions", ())  # of an ExceptionGroup
        found: list[object] = [each.__cause__, each.__context__, *(grouped if isinstance(grouped, tuple) else ())]
        waiting.extend(other for other in found if isinstance(other, BaseException))
    try:
        records = await store.query_spans(
            rollout.rollout_id,
            rollout.attempt.attempt_id,
            name=RAW_SPAN,
            sort_by="sequence_id",
            sort_order="desc",
            limit=1,
        )
    except Exception as error:  # the attempt has failed in any case; only its reason stays the general one
        logger.debug("[Rollout %s] the store did not say how its last call ended: %s", rollout.rollout_id, error)
        return ending
    refused = any(record.attributes.get(_ERROR_CODE) == BUDGET_EXHAUSTED for record in records)
    return replace(ending, reason="budget") if refused else ending
