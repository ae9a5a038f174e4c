"""Random micro-batches for the tests of the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from agentlightning.training.loss_settings import LossSettings
from agentlightning.training.losses.objective import BatchInputs, PolicyLoss, highest_entropy, policy_loss
from agentlightning.training.losses.weights import token_weights

ROLLOUTS = torch.tensor([0, 0, 1, 2, 2, 3])
"""Six rows of four rollouts."""


def random_rows(seed: int = 0, rows: int = 6, length: int = 7) -> dict[str, Tensor]:
    """Return mask, advantages and the four log-probabilities and entropies of random rows.

    Functions below also take rows with `stale`, and rows without `old_logprobs`.
    """
    make = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make)

    new = -torch.rand(rows, length, generator=make) * 3
    mask = torch.rand(rows, length, generator=make) < 0.7
    mask[:, 0] = False
    mask[:, 1] = True
    return {
        "mask": mask,
        "advantages": normal(rows),
        "logprobs": new,
        "old_logprobs": new + normal(rows, length) * 0.4,
        "sampler_logprobs": new + normal(rows, length) * 0.5,
        "reference_logprobs": new + normal(rows, length) * 0.5,
        "entropy": torch.rand(rows, length, generator=make) * 2,
    }


def loss_of(
    settings: LossSettings, rows: dict[str, Tensor], weights: Tensor, tokens: int, at: slice | Tensor = slice(None)
) -> tuple[PolicyLoss, Tensor, Tensor]:
    """Return the loss of some of the rows with its gradients by log-probabilities and by entropies, (b, T) each."""
    logprobs = rows["logprobs"][at].clone().requires_grad_()
    entropy = rows["entropy"][at].clone().requires_grad_()
    kept, share = None, settings.top_entropy_quantile
    if share < 1:
        kept = highest_entropy(rows["entropy"], rows["mask"], share)
    inputs = BatchInputs(
        mask=rows["mask"][at],
        advantages=rows["advantages"][at][:, None],
        weights=weights[at],
        tokens=tokens,
        sampler_logprobs=rows["sampler_logprobs"][at],
        kept=None if kept is None else kept[at],
        kept_tokens=0 if kept is None else int(kept.sum()),
        **{name: rows[name][at] for name in ("old_logprobs", "reference_logprobs", "stale") if name in rows},
    )
    result = policy_loss(settings, inputs, logprobs, entropy)
    result.loss.backward()
    return result, _gradient(logprobs), _gradient(entropy)


def whole_loss(
    settings: LossSettings, rows: dict[str, Tensor], rollouts: Tensor = ROLLOUTS
) -> tuple[PolicyLoss, Tensor, Tensor]:
    """Return the loss of all rows as one mini-batch, with its gradients."""
    return loss_of(settings, rows, weights_of(settings, rows, rollouts), int(rows["mask"].sum()))


def weights_of(settings: LossSettings, rows: dict[str, Tensor], rollouts: Tensor = ROLLOUTS) -> Tensor:
    """Return the weights of all rows as one mini-batch: (B, T)."""
    return token_weights(rows["mask"], rollouts, settings.aggregates_by, constant_length=settings.constant_length(5))


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
