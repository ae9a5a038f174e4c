"""Replies that grow or shrink."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from agentlightning.errors import BadRequestError
from agentlightning.training.alarms.rule import Measurement, Rule, number, start_of
from agentlightning.training.progress import StepFigures


@dataclass(frozen=True, kw_only=True)
class LengthDrift(Rule):
    """The replies have become much longer or much shorter than in the first steps."""

    name = "length_drift"
    what_to_try = (
        "read a few rollouts: does the reward favour long or short replies; soft_punish_cache and "
        "overlong_penalty_factor against growth; loss_type='dr_grpo' or aggregation='constant', in which "
        "length does not weigh; beta above 0"
    )

    factor: float = 2.0
    """Replies may be so many times as long as in the first steps, or as short."""
    reference_steps: int = 3
    """So many first steps are compared with."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor <= 1:
            raise BadRequestError(f"alarms: length_drift.factor must be above 1; got {self.factor!r}")

    @override
    def measure(self, steps: Sequence[StepFigures]) -> Measurement | None:
        lengths = [number(figures.completion_tokens) for figures in steps]
        start, now = start_of(lengths, self.reference_steps), lengths[-1]
        if not start or now is None:
            return None
        grown = now >= start
        threshold = start * self.factor if grown else start / self.factor
        first = f"{start:.1f} in the first {self.reference_steps} steps"
        text = f"a reply has {now:.1f} tokens, {first} (limit {threshold:.1f})"
        return self.above(now, threshold, text) if grown else self.below(now, threshold, text)
