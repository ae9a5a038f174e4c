"""Generalised advantage estimation (GAE, arXiv:1506.02438, equation 16), as pure functions on tensors.

A sequence is all that the policy produced in one rollout, in the order in which it did, whatever token rows it is in.
Tokens of the environment have no value of their own: the value after a token is that of the policy's next one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, before any whitening; 0 outside the mask.

    With `d_t = r_t + gamma V_next - V_t`, `A_t = d_t + gamma lam A_next` and the return is `A_t + V_t`, where next is
    the next token of the mask; after the last one both are 0. Rewards outside the mask do not count.

    Shapes: rewards, values: (R, L) float, mask: (R, L) bool; result: (R, L) each.
    """
    advantages = torch.zeros_like(values)
    next_value, next_advantage = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])  # (R,)
    for t in reversed(range(values.shape[1])):
        found = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * next_advantage
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        next_advantage = torch.where(mask[:, t], found, next_advantage)
        advantages[:, t] = torch.where(mask[:, t], found, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


def whitened(values: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Return the values less their mean and divided by their deviation over the mask, 0 outside of it.

    One value alone is 0. The variance is that of a sample (divided by N - 1), and `eps` is added to it, as in VERL.

    Shapes: values: (...) float, mask: the same, bool.
    """
    chosen = values[mask]
    centred = chosen - chosen.mean()
    variance = centred.square().sum() / max(1, len(chosen) - 1)
    return torch.zeros_like(values).masked_scatter(mask, centred * torch.rsqrt(variance + eps))


def in_order_of_time(mask: Tensor, rollouts: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the trained tokens of each rollout are, the earliest first, and which of these places are filled.

    Shapes:
        mask: (B, T) bool, true on the tokens to train.
        rollouts: (B,) equal for the rows of one rollout, 0 .. R-1.
        times: (B, T) the number of the model call that each comes from; those of one call go by their place.
        result: (R, L) int64 indices into the flattened (B * T), and (R, L) bool.
    """
    rows, columns = mask.nonzero(as_tuple=True)  # (N,) each, by row and place
    order = torch.argsort(times[rows, columns], stable=True)
    order = order[torch.argsort(rollouts[rows][order], stable=True)]
    rows, columns = rows[order], columns[order]
    of = rollouts[rows]
    lengths = torch.bincount(of)  # (R,)
    place = torch.arange(len(of), device=of.device) - (lengths.cumsum(0) - lengths)[of]
    index = torch.zeros((len(lengths), int(lengths.max())), dtype=torch.int64, device=of.device)
    filled = torch.zeros_like(index, dtype=torch.bool)
    index[of, place] = rows * mask.shape[1] + columns
    filled[of, place] = True
    return index, filled
