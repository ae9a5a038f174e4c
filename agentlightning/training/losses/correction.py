"""Weights for what engine and learner differ in: both hold the same weights and compute with other kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from agentlightning.training.losses.kl import MAX_LOG_RATIO
from agentlightning.training.settings import CorrectionMode


def correction_weights(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    mode: CorrectionMode = "sequence_mask",
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
) -> Tensor:
    """Return the importance weight of each token, learner over engine, without gradient; 0 where the mask is.

    A weight beyond its bounds is held at the bound (truncated importance sampling, "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training", 2025) or is 0 (`mask`; with both bounds it is IcePop,
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
