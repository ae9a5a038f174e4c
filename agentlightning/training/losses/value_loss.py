"""The clipped value loss of PPO, as a pure function on tensors (arXiv:1707.06347, equation 9; the clip: OpenAI's code,
arXiv:2005.12729, section 3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """What one micro-batch gives; it adds up over micro-batches.

    Attributes:
        loss: scalar with gradient, before `vf_coef`.
        clip_fraction: share of the mini-batch's tokens whose value was bounded.
    """

    loss: Tensor
    clip_fraction: Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, *, cliprange: float, tokens: int
) -> ValueLoss:
    """Return the sum over the tokens of `w/2 max((V - R)^2, (clip(V, V_old +- cliprange) - R)^2)`.

    Shapes: values: (B, T) with gradient; old_values, returns: (B, T) without; weights: (B, T), 0 where nothing is
        trained. `tokens` is how many tokens of the mini-batch are trained.
    """
    bounded = torch.minimum(torch.maximum(values, old_values - cliprange), old_values + cliprange)
    free, held = (values - returns).square(), (bounded - returns).square()
    clipped = (held > free) & (weights != 0)
    return ValueLoss(0.5 * (weights * torch.maximum(free, held)).sum(), clipped.sum() / tokens)
