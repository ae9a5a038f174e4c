"""What each token of a batch is credited with: its advantage and its return, by the values of the critic."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from agentlightning.training.learner.batch import Batch
from agentlightning.training.losses.gae import gae, in_order_of_time, whitened
from agentlightning.training.ppo_settings import CriticSettings


def with_credit(batch: Batch, values: Tensor, penalty: Tensor, critic: CriticSettings) -> Batch:
    """Return the batch with values, returns and advantages of its tokens.

    The reward of a rollout comes at the last token that the policy produced in it, whichever row that is in, and
    reaches all its rows from there.

    Shapes: batch.advantages: (B, 1) the reward of each row's rollout; values: (B, T) of the state before each trained
        token; penalty: (B, T) taken from the reward of each; in the result (B, T) each.
    """
    index, filled = in_order_of_time(batch.mask, batch.rollouts, batch.times)  # (R, L) each
    of_tokens = torch.where(filled, values.flatten()[index], 0.0)
    rewards = torch.where(filled, -penalty.flatten()[index], 0.0)
    last, rollouts = filled.sum(dim=1) - 1, torch.arange(len(index), device=index.device)  # (R,) each
    earned = batch.advantages.expand_as(batch.mask).flatten()[index[:, 0]]  # (R,)
    rewards[rollouts, last] += earned
    advantages, returns = gae(rewards, of_tokens, filled, gamma=critic.gamma, lam=critic.lam)
    found = [torch.zeros_like(values).flatten() for _ in range(2)]
    for flat, one in zip(found, (advantages, returns), strict=True):
        flat[index[filled]] = one[filled]
    of_rows = [flat.view_as(values) for flat in found]
    if critic.whiten_advantages:
        of_rows[0] = whitened(of_rows[0], batch.mask)
    return replace(batch, advantages=of_rows[0], values=values, returns=of_rows[1])


def explained(batch: Batch) -> dict[str, float]:
    """Return how much of the variance of the returns the values explain (1: all; 0 or less: nothing), and the means of
    both; the first is NaN where all returns are equal."""
    assert batch.values is not None
    assert batch.returns is not None
    values, returns = batch.values[batch.mask], batch.returns[batch.mask]
    variance = float(returns.var(correction=0))
    share = 1 - float((returns - values).var(correction=0)) / variance if variance else float("nan")
    return {"explained_variance": share, "mean_value": float(values.mean()), "mean_return": float(returns.mean())}
