"""Replies that end at their limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from agentlightning.training.alarms.rule import Measurement, Rule, number
from agentlightning.training.progress import StepFigures


@dataclass(frozen=True, kw_only=True)
class CutOff(Rule):
    """Many calls end at `max_completion_length` and not by themselves."""

    name = "cut_off"
    what_to_try = (
        "a greater max_completion_length; soft_punish_cache, which makes long replies cost; "
        "mask_truncated_completions=True, which does not train rollouts that were cut; a prompt that asks for "
        "less"
    )

    limit: float = 0.3
    """Largest share of a step's calls."""

    @override
    def measure(self, steps: Sequence[StepFigures]) -> Measurement | None:
        share = number(steps[-1].cut_share)
        if share is None:
            return None
        return self.above(
            share, self.limit, f"{share:.0%} of the calls ended at max_completion_length (limit {self.limit:.0%})"
        )
