"""Estimates of the KL divergence of the learner from a reference, token by token."""

from __future__ import annotations

from torch import Tensor

from agentlightning.training.loss_settings import KLEstimator
from agentlightning.training.losses.formulas import MAX_LOG_RATIO


def kl_divergence(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """Return an estimate of KL(learner || reference) at each token that the learner sampled.

    With `d = log p - log q`: k1 is d, k2 is d**2 / 2, k3 is exp(-d) + d - 1 (J. Schulman, "Approximating KL
    Divergence", 2020). The means of k1 and k3 are the divergence; k3 is never negative and varies least. Only k2 has a
    gradient whose mean is that of the divergence. If multiplied by the ratio of learner to sampler (the unbiased
    estimate of DeepSeek-V3.2, arXiv:2512.02556), k1 and k3 also have it, for any sampler; for k2 with any sampler, the
    factor is the ratio without gradient.

    Shapes: logprobs, reference_logprobs, result: (B, T).
    """
    d = (logprobs - reference_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return d
    return d.square() / 2 if estimator == "k2" else (-d).exp() + d - 1


def update_figures(engine: Tensor, before: Tensor, after: Tensor) -> dict[str, float]:
    """Return the distance of engine and learner before an update, and of the learner before and after it.

    Shapes: (N,) log-probabilities of trained tokens that the weights before the update sampled.
    """
    off = (before - engine).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    error = (off.exp() - 1).abs().max()
    return {"first_ratio_error": float(error), "update_kl": float(kl_divergence(before, after).mean())}
