"""Steps that change no weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from agentlightning.training.alarms.rule import Measurement, Rule
from agentlightning.training.progress import StepFigures, excluded_text


@dataclass(frozen=True, kw_only=True)
class NothingTrained(Rule):
    """No model call of a step was trained."""

    name = "nothing_trained"
    what_to_try = (
        "the reasons are in the ledger: agl runs ledger RUN; for equal_rewards see the alarm of that name; "
        "for no_reward the agent has to return or emit a reward"
    )

    patience: int = 2
    margin: float = 0.0

    @override
    def measure(self, steps: Sequence[StepFigures]) -> Measurement | None:
        figures = steps[-1]
        reasons = excluded_text(figures.calls_excluded)
        return self.below(
            figures.calls_trained,
            1,
            f"{figures.calls_trained} calls were trained of {figures.calls_captured}; {reasons}",
        )
