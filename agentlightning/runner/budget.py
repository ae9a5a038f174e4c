"""Whether an attempt ended because the budget of its rollout was used up.

The gateway refuses every further call then, with a code that most client libraries pass on in their error. Where a
library hides it, the gateway's record of the attempt's last call tells.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from agentlightning.adapter.tokens import RAW_SPAN
from agentlightning.runner.outcome import Ending
from agentlightning.semconv import BUDGET_EXHAUSTED, LightningCallAttributes
from agentlightning.store.base import LightningStore
from agentlightning.types import AttemptedRollout

logger = logging.getLogger(__name__)
_ERROR_CODE = LightningCallAttributes.ERROR_CODE.value


async def with_budget_reason(ending: Ending, store: LightningStore, rollout: AttemptedRollout) -> Ending:
    """Return the ending of an attempt that was left by an exception, with the reason `budget` if that is why."""
    if ending.reason != "exception" or ending.cause is None:
        return ending
    told = any(_tells(error) for error in _chain(ending.cause))
    return replace(ending, reason="budget") if told or await _last_call_was_refused(store, rollout) else ending


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception with those that led to it or are grouped in it, each once."""
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            grouped: Any = getattr(each, "exceptions", ())  # of an ExceptionGroup
            found: list[Any] = [each.__cause__, each.__context__, *(grouped if isinstance(grouped, tuple) else ())]
            waiting.extend(other for other in found if isinstance(other, BaseException))


def _tells(error: BaseException) -> bool:
    try:
        return getattr(error, "code", None) == BUDGET_EXHAUSTED or BUDGET_EXHAUSTED in str(error)
    except Exception:  # a broken __str__ of the user's
        return False


async def _last_call_was_refused(store: LightningStore, rollout: AttemptedRollout) -> bool:
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
        return False
    return any(record.attributes.get(_ERROR_CODE) == BUDGET_EXHAUSTED for record in records)
