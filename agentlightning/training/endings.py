"""The endings of the rollouts of a whole run: one without a rollout to learn from ends with an error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from agentlightning.errors import NoScoredRolloutError
from agentlightning.training.collect import Evidence
from agentlightning.training.drift_guard import first_refusal
from agentlightning.training.rows import StepRows


class Endings:
    """Counts the training rollouts of a run by what became of them. Belongs to the loop."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._scored = 0
        self._first_error: str | None = None

    def state(self) -> dict[str, Any]:
        """Return what `restore` takes, as JSON data."""
        return {"counts": dict(self._counts), "scored": self._scored, "first_error": self._first_error}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from an earlier start of the run."""
        self._counts = Counter(state["counts"])
        self._scored, self._first_error = state["scored"], state["first_error"]

    def add(self, collected: Sequence[Evidence], rows: StepRows) -> None:
        """Take in the rollouts of a step and what was read of them, in the same order."""
        self._scored += len(rows.rewards)
        self._counts.update(rows.excluded_rollouts)
        for one, record in zip(collected, rows.records, strict=True):
            if self._first_error is not None:
                return
            if one.latest is not None and one.latest.error is not None:
                self._first_error = f"{record.rollout_id}: {one.latest.error.type}: {one.latest.error.message}"
            elif record.verdict == "refused_call":
                self._first_error = f"{record.rollout_id}: {first_refusal(record)}"

    def require_scored(self) -> None:
        """Return if there was a rollout with a reward to learn from.

        Raises:
            NoScoredRolloutError: there was none.
        """
        if self._scored or not self._counts:
            return
        counts = ", ".join(f"{number} {reason}" for reason, number in self._counts.most_common())
        error = f" The first error, of rollout {self._first_error}." if self._first_error else ""
        raise NoScoredRolloutError(
            f"The run took no rollout to learn from: of {self._counts.total()} rollouts {counts}.{error} Its model is "
            "the one that it began with. See one of them with: agl rollouts list, agl rollouts explain <rollout id>"
        )
