"""Watches a training run as it reads rollouts: are there calls to train, and do their tokens drift?

Rollouts without a trainable call are excluded and the run goes on; a report with a table of one of them is given once.
Where a whole first batch has none, and where the tokens drift more than is allowed, the run ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentlightning.adapter.rows.drift import Decode
from agentlightning.adapter.rows.seams import describe
from agentlightning.algorithm.ledger.record import RolloutRecord
from agentlightning.errors import NoTrainableCallError, TooMuchDriftError


@dataclass
class DriftGuard:
    """Reports what keeps a run from learning. Belongs to the loop of the run, which asks it once per step, in order."""

    max_drift: float | None = None
    """Largest share of turns that may drift; None is no limit."""
    decode: Decode | None = None
    turns: int = field(default=0, init=False)
    """Model calls that are in rows, of the whole run."""
    drifts: int = field(default=0, init=False)
    """Those among them that begin a row because of template or tokenizer."""
    _first_step_seen: bool = field(default=False, init=False)
    _reported: bool = field(default=False, init=False)

    @property
    def drift_rate(self) -> float:
        """Drifts per turn, of the whole run; 0 before the first turn."""
        return self.drifts / self.turns if self.turns else 0.0

    def count_drift(self, records: Sequence[RolloutRecord]) -> None:
        """Count the turns and drifts of a step.

        Raises:
            TooMuchDriftError: the run is beyond its limit; shows a seam of this step.
        """
        self.turns += sum(record.reading.turns for record in records)
        self.drifts += sum(len(record.reading.drifts) for record in records)
        if self.max_drift is None or self.drift_rate <= self.max_drift:
            return
        record = next(record for record in records if record.reading.drifts)
        example = describe(record.reading.drifts[0], record.calls, self.decode)
        raise TooMuchDriftError(
            f"{self.drifts} of {self.turns} turns came back in other tokens than were recorded ({self.drift_rate:.1%}, "
            f"max_drift={self.max_drift}). Each of them begins a row of its own. An example, of rollout "
            f"{record.rollout_id}:\n{example}\n"
            "To try: a chat template that shows earlier turns as they were said, or a higher max_drift"
        )

    def untrainable(self, records: Sequence[RolloutRecord]) -> str | None:
        """Return a report on rollouts with a reward and no trainable call, the first time that there are any.

        Raises:
            NoTrainableCallError: it is the first step, and no rollout with a reward has such a call.
        """
        first, self._first_step_seen = not self._first_step_seen, True
        earned = [record for record in records if record.verdict is None]
        without = [record for record in earned if not record.samples]
        if not without or self._reported:
            return None
        self._reported = True
        report = f"The first of them, rollout {without[0].rollout_id}:\n{without[0].explain(self.decode)}"
        if first and len(without) == len(earned):
            raise NoTrainableCallError(
                f"None of the {len(earned)} rollouts with a reward in the first step has a model call that can be "
                f"trained: there is nothing to learn from. {report}"
            )
        return (
            f"{len(without)} of {len(earned)} rollouts with a reward have no model call that can be trained; they are "
            f"left out, and this is said once. {report}"
        )
