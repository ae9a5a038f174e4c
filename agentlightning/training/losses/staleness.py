"""Weights for tokens that older weights sampled: the decoupled objective of AReaL, arXiv:2505.24298, equation 5.

A stale token has three log-probabilities: of the weights that sampled it (behaviour, as the engine recorded it), of the
learner before its first optimizer step (proximal), and of the learner at hand. The clipped ratio is of the last two;
what lies between the first two is a weight without gradient. The paper leaves that weight unbounded; here it is held
at a bound. Tokens of the present weights have none: what engine and learner differ in is `correction.py`'s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentlightning.training.losses.kl import MAX_LOG_RATIO


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
    (`fresh_kl`), and how many are stale (`stale_share`), each divided by all `tokens` of the mini-batch: they add up
    over micro-batches, and the divergences to `approx_kl`."""
    off = torch.where(mask, logprobs.detach() - sampler_logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    each = (off.exp() - 1 - off) / tokens
    return {
        "stale_kl": float(each[stale].sum()),
        "fresh_kl": float(each[mask & ~stale].sum()),
        "stale_share": int(stale.sum()) / tokens,
    }
