"""Rollouts without a model call through the gateway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from agentlightning.training.alarms.rule import Measurement, Rule
from agentlightning.training.progress import StepFigures


@dataclass(frozen=True, kw_only=True)
class NoCalls(Rule):
    """No rollout of a step has a model call that came through the gateway."""

    name = "no_calls"
    what_to_try = (
        "let the agent call the endpoint of the resource that it is given (llm.endpoint), with llm.model as "
        "its model; agl rollouts explain shows what was seen of a rollout"
    )

    patience: int = 1
    margin: float = 0.0

    @override
    def measure(self, steps: Sequence[StepFigures]) -> Measurement | None:
        figures = steps[-1]
        rollouts = figures.rollouts_done + figures.rollouts_failed
        if not rollouts:
            return None
        return self.below(
            figures.calls_captured, 1, f"{figures.calls_captured} model calls were captured of {rollouts} rollouts"
        )
