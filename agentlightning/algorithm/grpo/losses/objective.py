"""The clipped policy-gradient loss over masked tokens, as pure functions on tensors.

`loss = - sum_t w_t * min(ratio_t * A, clip(ratio_t, 1 - low, 1 + high) * A)` (PPO, arXiv:1707.06347, equation 7, with
the asymmetric clip of DAPO, arXiv:2503.14476, equation 10). There is one A per rollout and no penalty towards a
reference model. The ratio of a token is between the weights that learn and those that sampled it, whose
log-probabilities are the engine's own record.

The weights w sum to one over what is in the batch, so the scale of a step depends neither on the number of rows nor on
how rollouts were cut into rows. Log-probabilities are natural logarithms throughout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentlightning.algorithm.grpo.settings import Aggregation

MAX_LOG_RATIO = 20.0  # exp(20) is far beyond any clip and far from overflow


@dataclass(frozen=True, slots=True)
class Objective:
    """What one batch gives: the loss to descend and figures to watch, all of them scalars over the masked tokens.

    Attributes:
        loss: scalar with gradient.
        clip_fraction: weight of the tokens where the clip decides, so that they give no gradient.
        approx_kl: mean of `ratio - 1 - log ratio`, an estimate of KL(sampler || learner) that is never negative.
        max_ratio_error: greatest `|ratio - 1|`; on the first pass it shows how well engine and learner agree.
        ratio: (B, T) of the learner's probability to the sampler's, 1 where not trained.
        clipped: (B, T) bool, where the clip decides.
    """

    loss: Tensor
    clip_fraction: Tensor
    approx_kl: Tensor
    max_ratio_error: Tensor
    ratio: Tensor
    clipped: Tensor

    def detached(self) -> Objective:
        """Return the same figures without the graph behind the loss."""
        return replace(self, loss=self.loss.detach())


def clipped_objective(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    clip: tuple[float, float] = (0.2, 0.28),
) -> Objective:
    """Return the loss and its figures.

    Shapes:
        logprobs: (B, T) of the weights that learn, with gradient.
        old_logprobs: (B, T) as the engine recorded them when it sampled.
        advantages: (B,) that of the rollout of each row.
        weights: (B, T) from `token_weights`; 0 leaves a token out.

    Args:
        clip: (low, high): the ratio is held within [1 - low, 1 + high].
    """
    low, high = clip
    trained = weights > 0  # (B, T)
    log_ratio = torch.where(trained, logprobs - old_logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()  # (B, T), 1 where not trained
    gain = ratio * advantages[:, None]
    clipped_gain = ratio.clamp(1 - low, 1 + high) * advantages[:, None]
    loss = -(weights * torch.minimum(gain, clipped_gain)).sum()
    with torch.no_grad():
        clipped = clipped_gain < gain
        clip_fraction = (weights * clipped).sum()
        approx_kl = (weights * (ratio - 1 - log_ratio)).sum()
        max_ratio_error = (ratio - 1).abs().max()
    return Objective(loss, clip_fraction, approx_kl, max_ratio_error, ratio.detach(), clipped)


def token_weights(mask: Tensor, rollouts: Tensor, aggregation: Aggregation = "token") -> Tensor:
    """Return the weight of each token in the loss; the weights sum to one.

    `"tokens"`: every trained token counts the same (DAPO, equation 12). `"rollouts"`: every rollout counts the same and
    shares its weight among its own tokens (GRPO, DeepSeekMath equation 3, with the rollout in the place of the output).
    Neither changes when a rollout is split into more rows.

    Shapes: mask: (B, T) 1 on the tokens to train, rollouts: (B,) integer, equal for the rows of one rollout;
        result: (B, T) float32.

    Raises:
        ValueError: No token is masked in, or `aggregation` is unknown.
    """
    trained = mask.float()  # (B, T)
    total = trained.sum()
    if total == 0:
        raise ValueError("the mask is 0 everywhere: there is no token to train on")
    if aggregation == "token":
        return trained / total
    if aggregation != "rollout":
        raise ValueError(f"aggregation must be 'token' or 'rollout', not {aggregation!r}")
    _, members = rollouts.unique(return_inverse=True)  # (B,) 0 .. R-1
    tokens_per_row = trained.sum(dim=1)  # (B,)
    tokens_per_rollout = tokens_per_row.new_zeros(int(members.max()) + 1).index_add_(0, members, tokens_per_row)  # (R,)
    trained_rollouts = (tokens_per_rollout > 0).sum()
    share = 1 / (tokens_per_rollout.clamp(min=1) * trained_rollouts)  # (R,)
    return trained * share[members][:, None]


def is_finite(*values: Tensor) -> bool:
    """Return whether every element of every tensor is a finite number."""
    return all(bool(value.isfinite().all()) for value in values)
