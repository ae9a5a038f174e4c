"""Importance weights of tokens: for the difference of engine and learner, and for tokens that older weights sampled.

A stale token has three log-probabilities: of the weights that sampled it (behaviour, as the engine recorded it), of the
learner before its first optimizer step (proximal), and of the current learner. The clipped ratio is that of the last
two; the ratio of the first two is a weight without gradient (the decoupled objective of AReaL, arXiv:2505.24298,
equation 5). The paper does not limit that weight; here it is clipped. Tokens of the current weights do not have that
weight: engine and learner use the same weights but different kernels, which `correction_weights` corrects.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentlightning.training.loss_settings import CorrectionMode
from agentlightning.training.losses.kl import MAX_LOG_RATIO


def correction_weights(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    mode: CorrectionMode = "sequence_mask",
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
) -> Tensor:
    """Return the importance weight of each token, learner over engine, without gradient; 0 where the mask is.

    A weight outside its limits is set to the limit (truncated importance sampling, "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training", 2025) or to 0 (`mask`; with both limits it is IcePop,
    arXiv:2510.18855). The weight of a sequence (a row) is the product of those of its tokens.

    Shapes:
        old_logprobs: (B, T) of the learner before the first optimizer step.
        sampler_logprobs: (B, T) as the engine recorded them.
        mask: (B, T) bool.
        result: (B, T).
    """
    difference = torch.where(mask, old_logprobs.detach() - sampler_logprobs, 0.0)  # (B, T)
    if mode.startswith("sequence"):
        difference = difference.sum(dim=1, keepdim=True).expand_as(difference)
    weights = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if mode.endswith("truncate"):
        return weights.clamp(min=clip_min, max=torch.inf if clip_max is None else clip_max) * mask
    beyond = weights > (torch.inf if clip_max is None else clip_max)
    return weights.masked_fill(beyond | (weights < (clip_min or 0.0)), 0.0) * mask


def staleness_weights(
    proximal_logprobs: Tensor, sampler_logprobs: Tensor, stale: Tensor, clip_max: float | None
) -> Tensor:
    """Return the weight of each stale token, proximal over behaviour probability, without gradient; 1 elsewhere.

    Shapes: all (B, T), `stale` bool.
    """
    difference = torch.where(stale, proximal_logprobs.detach() - sampler_logprobs, 0.0)
    weights = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return weights if clip_max is None else weights.clamp(max=clip_max)


def stale_figures(
    logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, stale: Tensor, tokens: int
) -> dict[str, float]:
    """Return the estimated divergence of the engine from the learner on stale tokens (`stale_kl`) and on all others
    (`fresh_kl`), and the share of stale tokens (`stale_share`), each divided by all `tokens` of the mini-batch: they
    add up over micro-batches, and the two divergences to `approx_kl`."""
    off = torch.where(mask, logprobs.detach() - sampler_logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    each = (off.exp() - 1 - off) / tokens
    return {
        "stale_kl": float(each[stale].sum()),
        "fresh_kl": float(each[mask & ~stale].sum()),
        "stale_share": int(stale.sum()) / tokens,
    }
