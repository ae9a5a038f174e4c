"""Training on replies of old weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from agentlightning.algorithm.alarms.rule import Measurement, Rule, number
from agentlightning.algorithm.progress import StepFigures


@dataclass(frozen=True, kw_only=True)
class StaleWeights(Rule):
    """The trained calls were served by weights that are several updates old."""

    name = "stale_weights"
    what_to_try = "a smaller max_staleness of agl.GRPO; more or faster runners; a smaller staleness_clip_max"

    limit: float = 2.0
    """Largest mean age of the trained calls, in updates."""

    @override
    def measure(self, steps: Sequence[StepFigures]) -> Measurement | None:
        behind = number(steps[-1].versions_behind)
        if behind is None:
            return None
        return self.above(
            behind, self.limit, f"trained calls are {behind:.2g} updates old on average (limit {self.limit:g})"
        )
