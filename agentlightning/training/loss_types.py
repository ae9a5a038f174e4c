"""The losses of the policy in one table, `LOSSES`, from which the settings and the objective read all differences.

In the formulas `r` is the ratio of a token, `A` its advantage and `p` its probability. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

LossType = Literal["grpo", "dapo", "dr_grpo", "cispo", "gspo"]
Aggregation = Literal["token", "sequence", "rollout", "constant"]


class RatioLimits(NamedTuple):
    """The ratios that count."""

    low: float
    """Smallest ratio that counts."""
    high: float
    """Largest ratio that counts."""
    delta: float | None
    """Largest ratio that counts if the advantage is negative; None is no limit."""


Formula = Callable[["Tensor", "Tensor", "Tensor", RatioLimits], "tuple[Tensor, Tensor]"]
"""A function of the ratio (B, T), the advantages (B, 1) or (B, T), the log-probabilities (B, T) and the limits that
returns the loss of each token and the limit that counted (uint8; 0: none, 1: low, 2: high, 3: delta): (B, T) each."""


def clipped_ratio(ratio: Tensor, advantages: Tensor, logprobs: Tensor, limits: RatioLimits) -> tuple[Tensor, Tensor]:
    """Return `-min(r A, clip(r, low, high) A)`: PPO, arXiv:1707.06347, equation 7; with two limits, DAPO,
    arXiv:2503.14476, equation 10. With delta `-min(min(r, delta) A, clip(r, low, high) A)`: dual clip,
    arXiv:1912.09729; two-sided clip, arXiv:2505.07291."""
    below = (ratio < limits.low) & (advantages < 0)
    above = (ratio > limits.high) & (advantages > 0)
    clipped = below.byte() + above.byte() * 2
    bounded = ratio.clamp(limits.low, limits.high)
    if limits.delta is not None:
        clipped = clipped + ((ratio > limits.delta) & (advantages < 0)).byte() * 3
        ratio = ratio.clamp(max=limits.delta)
    return -(ratio * advantages).minimum(bounded * advantages), clipped


def weighted_gradient(
    ratio: Tensor, advantages: Tensor, logprobs: Tensor, limits: RatioLimits
) -> tuple[Tensor, Tensor]:
    """Return `-stop(min(r, high)) A log p`: MiniMax-M1, arXiv:2506.13585; ScaleRL, arXiv:2510.13786."""
    bounded = ratio.clamp(limits.low, limits.high)
    return -bounded.detach() * advantages * logprobs, (ratio > limits.high).byte() * 2


def cross_entropy(ratio: Tensor, advantages: Tensor, logprobs: Tensor, limits: RatioLimits) -> tuple[Tensor, Tensor]:
    """Return `-A log p`, where every A is 1: the cross entropy of the chosen tokens."""
    return -advantages * logprobs, ratio.new_zeros(ratio.shape).byte()


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The properties that distinguish one loss from the others."""

    formula: Formula = clipped_ratio
    aggregation: Aggregation
    """Default of the setting `aggregation`."""
    ratio_of: Literal["token", "row"] = "token"
    """`row`: each token has the ratio of its row (the geometric mean of the ratios of its tokens) and its own gradient.
    A penalty per token is then biased, so `use_bias_correction_kl` is rejected."""
    high_is_ratio: bool = False
    """Whether `epsilon_high` is the largest ratio itself (at least 1), and 0 the smallest one."""
    takes_delta: bool = True
    """Whether `delta` is supported."""

    def limits(self, epsilon: float, epsilon_high: float, delta: float | None) -> RatioLimits:
        """Return the ratios that count."""
        return RatioLimits(*((0.0, epsilon_high) if self.high_is_ratio else (1 - epsilon, 1 + epsilon_high)), delta)


LOSSES: Final[Mapping[LossType, Loss]] = {
    "grpo": Loss(aggregation="rollout"),
    "dapo": Loss(aggregation="token"),
    "dr_grpo": Loss(aggregation="constant"),
    "cispo": Loss(aggregation="token", formula=weighted_gradient, high_is_ratio=True, takes_delta=False),
    # arXiv:2507.18071, equations 5 and 7, and the section on GSPO-token
    "gspo": Loss(aggregation="rollout", ratio_of="row", takes_delta=False),
}
CROSS_ENTROPY: Final = Loss(aggregation="token", formula=cross_entropy)
"""The loss of supervised fine-tuning, which no `loss_type` names."""
