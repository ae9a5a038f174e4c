"""Turns that come back in other tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from agentlightning.training.alarms.rule import Measurement, Rule, number
from agentlightning.training.progress import StepFigures


@dataclass(frozen=True, kw_only=True)
class TokenDrift(Rule):
    """Chat template or tokenizer bring earlier turns back in other tokens than were sampled: rows are cut there."""

    name = "token_drift"
    what_to_try = (
        "a chat template that shows earlier turns as they were said (reasoning included); an agent that does "
        "not rewrite the model's messages; agl rollouts explain shows such a turn; max_drift ends a run "
        "beyond a limit"
    )

    limit: float = 0.1
    """Largest share of the run's turns so far."""

    @override
    def measure(self, steps: Sequence[StepFigures]) -> Measurement | None:
        rate = number(steps[-1].drift_rate)
        if rate is None:
            return None
        return self.above(
            rate, self.limit, f"{rate:.1%} of the turns so far came back in other tokens (limit {self.limit:.0%})"
        )
