"""Outcomes of attempts in stores that have no place for them: kept in, and read from, the metadata of the attempt."""

from __future__ import annotations

from typing import Any, cast

from agentlightning.types import Attempt, AttemptedRollout, AttemptError, PaginatedResult

OUTCOME_FIELDS = frozenset(("outcome", "outcome_reason", "error"))
OUTCOME_KEY = "agentlightning.outcome"
"""The key of the metadata under which the three fields are kept."""


def keep_outcome(metadata: dict[str, Any] | None, said: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata with what is said of the outcome added to what it says already."""
    known: dict[str, Any] = dict(metadata or {})
    error = said.get("error")
    plain = {**said, "error": error.model_dump()} if isinstance(error, AttemptError) else said
    return {**known, OUTCOME_KEY: {**known.get(OUTCOME_KEY, {}), **plain}}


def with_outcomes(answer: Any) -> Any:
    """Return an answer of a store whose attempts have the outcomes that their metadata hold; others as they are."""
    if isinstance(answer, Attempt):
        kept = (answer.metadata or {}).get(OUTCOME_KEY)
        return Attempt.model_validate({**answer.model_dump(), **kept}) if kept else answer
    if isinstance(answer, AttemptedRollout):
        attempt = with_outcomes(answer.attempt)
        return answer if attempt is answer.attempt else answer.model_copy(update={"attempt": attempt})
    if isinstance(answer, PaginatedResult):
        page = cast("PaginatedResult[Any]", answer)
        return page.model_copy(update={"items": [with_outcomes(item) for item in page.items]})
    return answer
