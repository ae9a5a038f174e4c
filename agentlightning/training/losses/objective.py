"""The loss of an optimizer step, as a pure function on tensors: `policy_loss`, called once per micro-batch.

    weights = token_weights(mask, rollouts, settings.aggregates_by, ...)       # once per mini-batch, (B, T)
    result = policy_loss(settings, LossInputs(...), logprobs, entropy)         # per micro-batch
    result.loss.backward()                                                     # losses and gradients add up exactly

Every log-probability is a natural logarithm at the temperature of sampling. With `r` the ratio of a token, `A` the
advantage of its rollout, `w` its weight and `c` its correction (1 without), the loss is the sum over the tokens of

    w * (c * policy + beta * kl) - entropy_coef * entropy / tokens

| loss_type | policy | source |
| --- | --- | --- |
| grpo, dapo, dr_grpo | `-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)` | PPO, arXiv:1707.06347, equation 7; the two bounds, DAPO, arXiv:2503.14476, equation 10 |
| the same with delta | `-min(min(r, delta) A, clip(r) A)` | dual clip, arXiv:1912.09729; two-sided clip, arXiv:2505.07291 |
| cispo | `-stop(min(r, epsilon_high)) A log p` | MiniMax-M1, arXiv:2506.13585; ScaleRL, arXiv:2510.13786 |
| none, by SFT | `-A log p`, where every A is 1 | cross entropy of the chosen tokens |
| gspo | as grpo, with `r` that of the row: the geometric mean of its tokens' | GSPO, arXiv:2507.18071, equations 5 and 7, and section on GSPO-token |

The ratio is that of the weights that learn to those that sampled, whose log-probabilities the engine recorded. With
`importance_sampling_correction` the learner before the first optimizer step replaces the latter, and `c` corrects the
difference of engine and learner (`importance.py`). A token that older weights sampled is always compared with the
learner before the first optimizer step, and `c` corrects the difference of the weights (`importance.py`).
"""  # noqa: E501 -- a row of a table is one line

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from agentlightning.training.losses.importance import correction_weights, staleness_weights
from agentlightning.training.losses.kl import MAX_LOG_RATIO, kl_divergence
from agentlightning.training.settings import LossSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The inputs of the loss for B rows of at most T tokens, except the learner's current outputs.

    Attributes:
        mask: (B, T) bool, true exactly on the tokens to train.
        advantages: (B, 1) of each row's rollout, or (B, T) of each token.
        weights: (B, T) the rows' part of `token_weights` of the mini-batch.
        tokens: number of trained tokens of the whole mini-batch.
        sampler_logprobs: (B, T) as the engine recorded them.
        old_logprobs: (B, T) of the learner before the first optimizer step; None if that is the current step.
        reference_logprobs: (B, T) of the reference; required with `settings.has_kl_loss`.
        stale: (B, T) bool, true on trained tokens that other weights than those before the first optimizer step
            sampled; None without any.
    """

    mask: Tensor
    advantages: Tensor
    weights: Tensor
    tokens: int
    sampler_logprobs: Tensor
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    stale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TokenFigures:
    """The figures of each token in the loss, without gradient: (B, T) each, 0 where the mask is (the ratio is 1 there).

    Attributes:
        ratio: ratio of the learner to the probability that it is compared with, before clipping.
        clipped: uint8; 0: the ratio itself counts, 1: the lower bound counts, 2: the upper one, 3: `delta`.
        weight: share of the token in the loss of its optimizer step.
        correction: bounded ratio of learner and engine; 1 without `importance_sampling_correction`. For a stale token,
            the bounded ratio of learner and older weights.
        kl: divergence in the penalty, before `beta`; 0 without.
    """

    ratio: Tensor
    clipped: Tensor
    weight: Tensor
    correction: Tensor
    kl: Tensor


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The results of one micro-batch: the loss to minimize, the figures of each token, and figures to monitor.

    Attributes:
        loss: scalar with gradient.
        tokens: the figures of each token in the loss.
        clip_fraction: share of the mini-batch's tokens whose ratio was clipped; adds up over micro-batches, as do the
            next three.
        approx_kl: mean of `q - 1 - log q` over the tokens, q being the probability of the learner over that of the
            engine: an estimate of KL(engine || learner) that is never negative.
        kl: mean divergence from the reference.
        entropy: mean, in nats.
        max_ratio_error: largest `|q - 1|` of a token that is not stale; on the first pass it shows how well engine and
            learner agree.
    """

    loss: Tensor
    tokens: TokenFigures
    clip_fraction: Tensor
    approx_kl: Tensor
    kl: Tensor
    entropy: Tensor
    max_ratio_error: Tensor

    def figures(self) -> dict[str, float]:
        """Return loss and figures as numbers."""
        return {f.name: float(getattr(self, f.name).detach()) for f in fields(self) if f.name != "tokens"}


def policy_loss(settings: LossSettings, inputs: LossInputs, logprobs: Tensor, entropy: Tensor) -> PolicyLoss:
    """Return the loss of a micro-batch and its figures.

    Shapes:
        logprobs: (B, T) of the weights that learn, with gradient; read where the mask is true.
        entropy: (B, T) of their distribution, in nats; with gradient if `settings.entropy_coef` is not 0.

    Raises:
        ValueError: The loss has a penalty and there are no `reference_logprobs`.
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
    ratio = _ratio(logprobs, old, mask, of_rows=settings.loss_type == "gspo")  # (B, T)
    policy, clipped = _policy(settings, ratio, advantages, logprobs)
    per_token = policy * correction
    kl = torch.zeros_like(correction)
    if settings.has_kl_loss:
        if inputs.reference_logprobs is None:
            raise ValueError(f"beta={settings.beta} needs the reference's log-probabilities")
        kl = torch.where(mask, kl_divergence(logprobs, inputs.reference_logprobs, settings.kl_estimator), 0.0)
        if settings.use_bias_correction_kl:  # the gradient of k2 is that of the divergence already: see `kl.py`
            kl = kl * (ratio.detach() if settings.kl_estimator == "k2" else ratio)
        per_token = per_token + settings.beta * kl
    loss = (inputs.weights * torch.where(mask, per_token, 0.0)).sum()
    mean_entropy = torch.where(mask, entropy, 0.0).sum() / inputs.tokens
    if settings.entropy_coef:
        loss = loss - settings.entropy_coef * mean_entropy
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
            max_ratio_error=(fresh.exp() - 1).abs().max(),
        )


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


def _policy(settings: LossSettings, ratio: Tensor, advantages: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the policy's part of the loss per token and the bound that counted: (B, T) each."""
    if settings.is_cross_entropy:
        return -advantages * logprobs, torch.zeros_like(ratio, dtype=torch.uint8)
    low, high = settings.ratio_bounds
    bounded = ratio.clamp(low, high)
    above = (ratio > high) & (advantages > 0)
    if settings.loss_type == "cispo":
        return -bounded.detach() * advantages * logprobs, (ratio > high).to(torch.uint8) * 2
    below = (ratio < low) & (advantages < 0)
    clipped = below.to(torch.uint8) + above.to(torch.uint8) * 2
    if settings.delta is not None:
        clipped = clipped + ((ratio > settings.delta) & (advantages < 0)).to(torch.uint8) * 3
        ratio = ratio.clamp(max=settings.delta)
    return -torch.minimum(ratio * advantages, bounded * advantages), clipped


def is_finite(*values: Tensor) -> bool:
    """Return whether every element of every tensor is a finite number."""
    return all(bool(value.isfinite().all()) for value in values)
