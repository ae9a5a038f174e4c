"""`PromotionRules`: what a candidate must be to be promoted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from agentlightning.evaluation.statistics import check_share
from agentlightning.field_help import explain_fields


@explain_fields
@dataclass(frozen=True)
class PromotionRules:
    """What a candidate must be: by default better, with a p-value below 0.05, and worse in no slice.

    Raises:
        ValueError: a figure is out of its range, or no finite number.
    """

    min_difference: float = 0.0
    """The mean reward must be higher by more than this, over the tasks that both sides have a reward of."""
    significance: float = 0.05
    """The p-value of the paired test must be below this."""
    check_slices: bool = True
    """No slice may be worse: none has a lower mean with a p-value below `slice_significance`, as it counts among all
    slices (Holm)."""
    slice_significance: float = 0.05
    """Below this p-value, as it counts among all slices, a lower mean of a slice is no chance."""
    max_slice_drop: float | None = None
    """The mean of no slice may fall by more than this, whether or not that can be chance; None asks nothing."""
    max_missing: float = 0.05
    """Share of the candidate's samples that may have no reward, on the tasks that the baseline scored: a fault is no
    low reward, but who fails where it is hard does not win by it."""
    floors: Mapping[str, float] = field(default_factory=dict[str, float])
    """Least mean of a figure of the candidate: `reward`, a dimension of the reward, or, of each rollout, its `seconds`
    or its `tokens`. Where a dimension has such a name, it is `reward.seconds`, and the rollout's `rollout.seconds`."""
    ceilings: Mapping[str, float] = field(default_factory=dict[str, float])
    """Greatest mean of a figure of the candidate, the same ones: a dimension may be a cost."""

    def __post_init__(self) -> None:
        check_share("significance", self.significance)
        check_share("slice_significance", self.slice_significance)
        if not (math.isfinite(self.min_difference) and self.min_difference >= 0.0):
            raise ValueError(f"min_difference={self.min_difference} must be 0 or a positive number")
        if self.max_slice_drop is not None and not (math.isfinite(self.max_slice_drop) and self.max_slice_drop >= 0.0):
            raise ValueError(f"max_slice_drop={self.max_slice_drop} must be 0 or a positive number")
        if not 0.0 <= self.max_missing <= 1.0:
            raise ValueError(f"max_missing={self.max_missing} must be a share between 0 and 1")
        for name, limit in (*self.floors.items(), *self.ceilings.items()):
            if not math.isfinite(limit):
                raise ValueError(f"the limit of {name!r} must be a finite number; got {limit}")
