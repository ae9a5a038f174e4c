"""Advantages of tokens from the values of a critic, and the loss of the values, as pure functions on tensors.

Generalised advantage estimation (GAE, arXiv:1506.02438, equation 16). A sequence has all tokens that the policy
produced in one rollout, in order of time, across its token rows. Tokens of the environment have no value: the value
after a token is that of the policy's next token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentlightning.training.batch import Batch
from agentlightning.training.loss_settings import CriticSettings


def with_credit(batch: Batch, values: Tensor, penalty: Tensor, critic: CriticSettings) -> Batch:
    """Return the batch with values, returns and advantages of its tokens.

    The reward of a rollout belongs to the last token that the policy produced in it, in any row, and propagates from
    there to all its rows.

    Shapes: batch.advantages: (B, 1) the reward of each row's rollout; values: (B, T) of the state before each trained
        token; penalty: (B, T) subtracted from the reward of each; in the result (B, T) each.
    """
    index, filled = in_order_of_time(batch.mask, batch.rollouts, batch.times)  # (R, L) each
    of_tokens = torch.where(filled, values.flatten()[index], 0.0)
    rewards = torch.where(filled, -penalty.flatten()[index], 0.0)
    last, rollouts = filled.sum(dim=1) - 1, torch.arange(len(index), device=index.device)  # (R,) each
    earned = batch.advantages.expand_as(batch.mask).flatten()[index[:, 0]]  # (R,)
    rewards[rollouts, last] += earned
    advantages, returns = gae(rewards, of_tokens, filled, gamma=critic.gamma, lam=critic.lam)
    flats = [torch.zeros_like(values).flatten() for _ in range(2)]
    for flat, one in zip(flats, (advantages, returns), strict=True):
        flat[index[filled]] = one[filled]
    of_rows = [flat.view_as(values) for flat in flats]
    if critic.whiten_advantages:
        of_rows[0] = whitened(of_rows[0], batch.mask)
    return replace(batch, advantages=of_rows[0], values=values, returns=of_rows[1])


def explained(batch: Batch) -> dict[str, float]:
    """Return the share of the variance of the returns that the values explain (1: all; 0 or less: nothing), and the
    means of values and returns; the share is NaN if all returns are equal."""
    assert batch.values is not None
    assert batch.returns is not None
    values, returns = batch.values[batch.mask], batch.returns[batch.mask]
    variance = float(returns.var(correction=0))
    share = 1 - float((returns - values).var(correction=0)) / variance if variance else float("nan")
    return {"explained_variance": share, "mean_value": float(values.mean()), "mean_return": float(returns.mean())}


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, before any whitening; 0 outside the mask.

    With `d_t = r_t + gamma V_next - V_t`, `A_t = d_t + gamma lam A_next` and the return is `A_t + V_t`, where next is
    the next token of the mask; after the last token both are 0. Rewards outside the mask do not count.

    Shapes: rewards, values: (R, L) float, mask: (R, L) bool; result: (R, L) each.
    """
    advantages = torch.zeros_like(values)
    next_value, next_advantage = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])  # (R,)
    for t in reversed(range(values.shape[1])):
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * next_advantage
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        advantages[:, t] = torch.where(mask[:, t], advantage, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


def whitened(values: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Return the values minus their mean and divided by their deviation over the mask, 0 outside of it.

    A single value becomes 0. The variance is that of a sample (divided by N - 1), and `eps` is added to it, as in VERL.

    Shapes: values: (...) float, mask: the same, bool.
    """
    chosen = values[mask]
    centred = chosen - chosen.mean()
    variance = centred.square().sum() / max(1, len(chosen) - 1)
    return torch.zeros_like(values).masked_scatter(mask, centred * torch.rsqrt(variance + eps))


def in_order_of_time(mask: Tensor, rollouts: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of each rollout's trained tokens, the earliest first, and a mask of the filled positions.

    Shapes:
        mask: (B, T) bool, true on the tokens to train.
        rollouts: (B,) equal for the rows of one rollout, 0 .. R-1.
        times: (B, T) the number of each token's model call; tokens of one call are ordered by position.
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


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """The value loss of one micro-batch; it adds up over micro-batches."""

    loss: Tensor
    """Scalar with gradient, before `vf_coef`."""
    clip_fraction: Tensor
    """Share of the mini-batch's tokens whose value was clipped."""


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, *, cliprange: float, tokens: int
) -> ValueLoss:
    """Return the sum over the tokens of `w/2 max((V - R)^2, (clip(V, V_old +- cliprange) - R)^2)` (PPO,
    arXiv:1707.06347, equation 9; the clip: OpenAI's code, arXiv:2005.12729, section 3).

    Shapes: values: (B, T) with gradient; old_values, returns: (B, T) without; weights: (B, T), 0 for tokens that are
    not trained. `tokens` is the number of trained tokens of the mini-batch.
    """
    bounded = torch.minimum(torch.maximum(values, old_values - cliprange), old_values + cliprange)
    free, held = (values - returns).square(), (bounded - returns).square()
    clipped = (held > free) & (weights != 0)
    return ValueLoss(0.5 * (weights * torch.maximum(free, held)).sum(), clipped.sum() / tokens)
