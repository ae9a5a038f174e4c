"""Engine and learner that do not agree on the probability of a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from agentlightning.training.alarms.rule import Measurement, Rule, updated
from agentlightning.training.progress import StepFigures


@dataclass(frozen=True, kw_only=True)
class EngineMismatch(Rule):
    """The learner gives a token another probability than the engine that sampled it, with the same weights."""

    name = "engine_mismatch"
    what_to_try = (
        "importance_sampling_correction=True; bf16=False, or the same precision on both sides; temperature, "
        "top_p and chat template as the engine had them; with several iterations or mini-batches a smaller "
        "learning_rate"
    )

    limit: float = 0.2
    """Greatest `|ratio - 1|` of any token before the first optimizer step of the update, tokens of older weights left
    out; 0.2 is usual for bfloat16, and float32 stays below 0.001."""

    @override
    def measure(self, steps: Sequence[StepFigures]) -> Measurement | None:
        error = updated(steps[-1], "first_ratio_error")
        if error is None:
            return None
        text = f"before the update a token's ratio of learner to engine is off by {error:.3g} (limit {self.limit:g})"
        return self.above(error, self.limit, text)
