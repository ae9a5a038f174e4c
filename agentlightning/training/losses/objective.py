"""The loss of an optimizer step, as a pure function on tensors: `policy_loss`, called once per micro-batch.

    weights = token_weights(mask, rollouts, settings.aggregates_by, ...)       # once per mini-batch, (B, T)
    result = policy_loss(settings, LossInputs(...), logprobs, entropy)         # per micro-batch
    result.loss.backward()                                                     # losses and gradients add up exactly

Every log-probability is a natural logarithm at the temperature of sampling. The loss is the sum over the tokens of

    w * (c * policy + beta * kl) - entropy_coef * entropy / tokens

- `w` is the weight of the token (`weights.py`), `policy` the formula of the `loss_type` (`formulas.py`), a function of
  the ratio `r` of the token and the advantage of its rollout.
- `r` is the probability of the token under the weights that learn, divided by that under the weights that sampled it,
  which the engine recorded; `c` is 1.
- With `importance_sampling_correction` the divisor is the probability under the learner before the first optimizer
  step, and `c` corrects the difference of engine and learner (`importance.py`).
- A token that older weights sampled always has that divisor, and `c` corrects the difference of the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from agentlightning.training.loss_settings import LossInputs, LossSettings
from agentlightning.training.losses.formulas import FORMULAS, MAX_LOG_RATIO
from agentlightning.training.losses.importance import correction_weights, staleness_weights
from agentlightning.training.losses.kl import kl_divergence


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInputs:
    """The inputs of the objective for B rows of at most T tokens, except the learner's current outputs."""

    mask: Tensor
    """(B, T) bool, true exactly on the tokens to train."""
    advantages: Tensor
    """(B, 1) of each row's rollout, or (B, T) of each token."""
    weights: Tensor
    """(B, T) the part of the mini-batch's `token_weights` that belongs to these rows."""
    tokens: int
    """Number of trained tokens of the full mini-batch."""
    sampler_logprobs: Tensor
    """(B, T) as the engine recorded them."""
    old_logprobs: Tensor | None = None
    """(B, T) of the learner before the first optimizer step; None if that is the current step."""
    reference_logprobs: Tensor | None = None
    """(B, T) of the reference; required with `settings.has_kl_loss`."""
    stale: Tensor | None = None
    """(B, T) bool, true on trained tokens that other weights than those before the first optimizer step sampled; None
    without any."""
    kept: Tensor | None = None
    """(B, T) bool, the tokens that `top_entropy_quantile` keeps; None keeps all."""
    kept_tokens: int = 0
    """Number of these tokens in the full mini-batch."""


@dataclass(frozen=True, slots=True)
class TokenFigures:
    """The values of each token in the loss, without gradient: (B, T) each, 0 where the mask is 0 (the ratio is 1)."""

    ratio: Tensor
    """Ratio of the learner to the probability that it is compared with, before clipping."""
    clipped: Tensor
    """uint8; 0: the ratio itself counts, 1: the lower limit counts, 2: the upper limit, 3: `delta`."""
    weight: Tensor
    """Share of the token in the loss of its optimizer step."""
    correction: Tensor
    """Clipped ratio of learner and engine; 1 without `importance_sampling_correction`. For a stale token, the clipped
    ratio of learner and older weights. 0 for a token that a mask removes from the policy's loss."""
    kl: Tensor
    """Divergence in the penalty, before `beta`; 0 without a penalty."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The results of one micro-batch: the loss to minimize, the values of each token, and metrics to monitor."""

    loss: Tensor
    """Scalar with gradient."""
    tokens: TokenFigures
    """The values of each token in the loss."""
    clip_fraction: Tensor
    """Share of the mini-batch's tokens whose ratio was clipped; adds up over micro-batches, as do the next three."""
    approx_kl: Tensor
    """Mean of `q - 1 - log q` over the tokens, q being the probability of the learner over that of the engine: an
    estimate of KL(engine || learner) that is never negative."""
    kl: Tensor
    """Mean divergence from the reference."""
    entropy: Tensor
    """Mean, in nats."""
    masked_fraction: Tensor
    """Share of the mini-batch's tokens with a correction of 0; adds up over micro-batches."""
    max_ratio_error: Tensor
    """Largest `|q - 1|` of a token that is not stale; on the first pass it shows how well engine and learner agree."""

    def figures(self) -> dict[str, float]:
        """Return loss and metrics as numbers."""
        return {f.name: float(getattr(self, f.name).detach()) for f in fields(self) if f.name != "tokens"}


def policy_loss(settings: LossSettings, inputs: BatchInputs, logprobs: Tensor, entropy: Tensor) -> PolicyLoss:
    """Return the loss of a micro-batch and its metrics.

    Shapes:
        logprobs: (B, T) of the weights that learn, with gradient; read where the mask is true.
        entropy: (B, T) of their distribution, in nats; with gradient if `settings.entropy_coef` is not 0.

    Raises:
        ValueError: the loss has a penalty, but `reference_logprobs` is None.
    """
    mask, advantages = inputs.mask, inputs.advantages  # (B, T), (B, 1) or (B, T)
    old = inputs.sampler_logprobs
    correction = mask.float()
    if settings.importance_sampling_correction:
        old = logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
        correction = correction_weights(
            old,
            inputs.sampler_logprobs,
            mask,
            settings.importance_sampling_mode,
            settings.importance_sampling_clip_max,
            settings.importance_sampling_clip_min,
        )
    if inputs.stale is not None:
        proximal = logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
        weights = staleness_weights(proximal, inputs.sampler_logprobs, inputs.stale, settings.staleness_clip_max)
        old = torch.where(inputs.stale, proximal, old)
        correction = torch.where(inputs.stale, weights, correction)
    ratio = _ratio(logprobs, old, mask, of_rows=settings.chosen_loss.ratio_of == "row")  # (B, T)
    chosen = settings.chosen_loss
    policy, clipped = FORMULAS[chosen.formula](
        LossInputs(
            logprobs=logprobs,
            old_logprobs=old,
            sampler_logprobs=inputs.sampler_logprobs,
            reference_logprobs=inputs.reference_logprobs,
            ratio=ratio,
            advantages=advantages,
            entropy=entropy,
            mask=mask,
            correction=correction,
            settings=settings,
        )
    )
    keep = torch.ones_like(mask) if inputs.kept is None else inputs.kept
    if settings.off_policy_mask_threshold is not None:
        keep = keep & near_policy(inputs, logprobs, settings.off_policy_mask_threshold)
    per_token = policy * (keep if chosen.uses_correction else correction * keep)
    correction = correction * keep
    kl = torch.zeros_like(correction)
    if settings.has_kl_loss:
        if inputs.reference_logprobs is None:
            raise ValueError(f"beta={settings.beta} requires the reference's log-probabilities")
        kl = torch.where(mask, kl_divergence(logprobs, inputs.reference_logprobs, settings.kl_estimator), 0.0)
        if settings.use_bias_correction_kl:  # the gradient of k2 is that of the divergence already: see `kl.py`
            kl = kl * (ratio.detach() if settings.kl_estimator == "k2" else ratio)
        per_token = per_token + settings.beta * kl
    if settings.kl_tau:
        per_token = per_token + settings.kl_tau * _log_ratio(logprobs, inputs.sampler_logprobs, mask).square()
    loss = (inputs.weights * torch.where(mask, per_token, 0.0)).sum()
    mean_entropy = torch.where(mask, entropy, 0.0).sum() / inputs.tokens
    if settings.entropy_coef:
        bonus = mean_entropy
        if inputs.kept is not None:
            bonus = torch.where(inputs.kept, entropy, 0.0).sum() / max(1, inputs.kept_tokens)
        loss = loss - settings.entropy_coef * bonus
    with torch.no_grad():
        off = _log_ratio(logprobs, inputs.sampler_logprobs, mask)
        fresh = off if inputs.stale is None else off.masked_fill(inputs.stale, 0.0)
        clipped = clipped * mask
        figures = TokenFigures(ratio.detach(), clipped, inputs.weights, correction, kl.detach())
        return PolicyLoss(
            loss,
            figures,
            clip_fraction=(clipped > 0).sum() / inputs.tokens,
            approx_kl=(off.exp() - 1 - off).sum() / inputs.tokens,
            kl=figures.kl.sum() / inputs.tokens,
            entropy=mean_entropy.detach(),
            masked_fraction=(mask & (correction == 0)).sum() / inputs.tokens,
            max_ratio_error=(fresh.exp() - 1).abs().max(),
        )


def near_policy(inputs: BatchInputs, logprobs: Tensor, threshold: float) -> Tensor:
    """Return which tokens are of a row with an advantage of at least 0, or with a mean log ratio of the engine's to the
    learner's probability of at most `threshold` (DeepSeek-V3.2, arXiv:2512.02556, equation 9): (B, T) bool."""
    distance = torch.where(inputs.mask, inputs.sampler_logprobs - logprobs.detach(), 0.0).sum(dim=1, keepdim=True)
    mean = distance / inputs.mask.sum(dim=1, keepdim=True).clamp(min=1)  # (B, 1)
    return ((inputs.advantages >= 0) | (mean <= threshold)).expand_as(inputs.mask)


def highest_entropy(entropy: Tensor, mask: Tensor, share: float) -> Tensor:
    """Return the tokens of the mask whose entropy is at least the quantile 1 - `share` of them: (B, T) bool
    (arXiv:2506.01939, equation 3). Shapes: entropy: (B, T), mask: (B, T) bool."""
    values = entropy[mask].float().sort().values  # torch's own quantile takes at most 2^24 values
    place = (1 - share) * (len(values) - 1)
    low = values[math.floor(place)]
    return mask & (entropy >= low + (values[math.ceil(place)] - low) * (place - math.floor(place)))


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, logprobs - old_logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, *, of_rows: bool) -> Tensor:
    """Return the ratio of each token, 1 outside the mask: (B, T). With `of_rows` each token has the value of its row's
    ratio and its own gradient (GSPO-token, which is GSPO if a row has one advantage)."""
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    if of_rows:
        mean = log_ratio.detach().sum(dim=1) / mask.sum(dim=1).clamp(min=1)  # (B,)
        log_ratio = torch.where(mask, logprobs - logprobs.detach() + mean[:, None], 0.0)
    return log_ratio.exp()


def is_finite(*values: Tensor) -> bool:
    """Return whether every element of every tensor is a finite number."""
    return all(bool(value.isfinite().all()) for value in values)
