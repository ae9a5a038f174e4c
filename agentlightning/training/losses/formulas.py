"""The formulas of the losses: the loss of each token, before its correction, penalties and weight.

In the formulas `r` is the ratio of a token, `A` its advantage and `p` its probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from torch import Tensor

from agentlightning.training.loss_settings import LossInputs, custom_loss, name_of

MAX_LOG_RATIO: Final = 20.0  # exp(20) is far beyond any clip and far from overflow
Formula = Callable[[LossInputs], tuple[Tensor, Tensor]]
"""A function that returns the loss of each token and the limit that counted (uint8; 0: none, 1: low, 2: high, 3:
delta): (B, T) each."""


def clipped_ratio(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Return `-min(r A, clip(r, low, high) A)`: PPO, arXiv:1707.06347, equation 7; with two limits, DAPO,
    arXiv:2503.14476, equation 10. With delta `-min(min(r, delta) A, clip(r, low, high) A)`: dual clip,
    arXiv:1912.09729; two-sided clip, arXiv:2505.07291."""
    ratio, advantages, limits = inputs.ratio, inputs.advantages, inputs.settings.ratio_limits
    below = (ratio < limits.low) & (advantages < 0)
    above = (ratio > limits.high) & (advantages > 0)
    clipped = below.byte() + above.byte() * 2
    bounded = ratio.clamp(limits.low, limits.high)
    if limits.delta is not None:
        clipped = clipped + ((ratio > limits.delta) & (advantages < 0)).byte() * 3
        ratio = ratio.clamp(max=limits.delta)
    return -(ratio * advantages).minimum(bounded * advantages), clipped


def weighted_gradient(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Return `-stop(min(r, high)) A log p`: MiniMax-M1, arXiv:2506.13585; ScaleRL, arXiv:2510.13786."""
    limits = inputs.settings.ratio_limits
    bounded = inputs.ratio.clamp(limits.low, limits.high)
    return -bounded.detach() * inputs.advantages * inputs.logprobs, (inputs.ratio > limits.high).byte() * 2


def soft_gate(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Return `-4 / t sigmoid(t (r - 1)) A`, with the temperature `t` of the sign of A: SAPO, arXiv:2511.20347."""
    settings, positive = inputs.settings, inputs.advantages > 0
    temperature = settings.sapo_temperature_pos * positive + settings.sapo_temperature_neg * ~positive
    gate = (temperature * (inputs.ratio - 1)).sigmoid() * 4 / temperature
    return -gate * inputs.advantages, _none_clipped(inputs)


def gamma_weight(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Return `-stop(w^k exp(l (1 - w))) A log p`, where `w` is the product of the ratios of a row (and of their
    corrections), and `k` and `l` are those of the sign of A: VESPO, arXiv:2602.10693."""
    settings, positive, smallest = inputs.settings, inputs.advantages >= 0, math.log(1e-8)
    ratios = (inputs.logprobs - inputs.old_logprobs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    corrections = inputs.correction.masked_fill(~inputs.mask, 1.0).log().clamp(smallest, MAX_LOG_RATIO)
    log_w = ((ratios + corrections) * inputs.mask).sum(dim=1, keepdim=True).clamp(smallest, MAX_LOG_RATIO)  # (B, 1)
    k = settings.vespo_k_pos * positive + settings.vespo_k_neg * ~positive
    rate = settings.vespo_lambda_pos * positive + settings.vespo_lambda_neg * ~positive
    weight = (rate + k * log_w - rate * log_w.exp()).exp()
    return -weight * inputs.advantages * inputs.logprobs, _none_clipped(inputs)


def masked_ratio(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Return `-r A`, and 0 for tokens whose probability has increased by more than `epsilon_high` or decreased by more
    than `epsilon`: the IPO of prime-rl. With `dppo`, an increase counts only if A is positive, and a decrease only if
    it is not (DPPO with the binary total variation, arXiv:2602.04879)."""
    change = (inputs.logprobs.exp() - inputs.old_logprobs.exp()).detach()
    limits = inputs.settings.ratio_limits
    below, above = change < -limits.low, change > limits.high
    if inputs.settings.loss_type == "dppo":
        below, above = below & (inputs.advantages <= 0), above & (inputs.advantages > 0)
    return -(inputs.ratio * inputs.advantages).masked_fill(below | above, 0.0), below.byte() + above.byte() * 2


def cross_entropy(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Return `-A log p`, where every A is 1: the cross entropy of the chosen tokens."""
    return -inputs.advantages * inputs.logprobs, _none_clipped(inputs)


def _none_clipped(inputs: LossInputs) -> Tensor:
    return inputs.ratio.new_zeros(inputs.ratio.shape).byte()


def custom(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Return the result of the setting `loss`.

    Raises:
        ValueError: its shape is not (B, T), or it has no gradient.
    """
    assert inputs.settings.loss is not None
    name, expected = name_of(inputs.settings.loss), tuple(inputs.mask.shape)
    value = custom_loss(inputs.settings.loss)(inputs)
    if not isinstance(value, Tensor) or value.shape != expected:
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"loss={name!r} must return the loss of each token, a tensor {expected}; got {found}")
    if not value.requires_grad:
        raise ValueError(f"loss={name!r} returned a tensor without gradient; compute it from inputs.logprobs")
    return value, _none_clipped(inputs)


FORMULAS: Final[Mapping[str, Formula]] = {
    function.__name__: function
    for function in (clipped_ratio, weighted_gradient, soft_gate, gamma_weight, masked_ratio, cross_entropy, custom)
}
