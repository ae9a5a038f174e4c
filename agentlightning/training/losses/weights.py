"""The weight of each token in the loss of an optimizer step.

`token`: DAPO, arXiv:2503.14476, equation 12. `sequence`: GRPO, arXiv:2402.03300, equation 3, a row being a sequence.
`rollout`: the same with all rows of a rollout as one sequence. `constant`: Dr. GRPO, arXiv:2503.20783, section 3.2.

Weights are computed over a whole mini-batch. A micro-batch gets its part of them, so the losses and gradients of
micro-batches add up to those of the mini-batch, for every split.
"""

from __future__ import annotations

from torch import Tensor

from agentlightning.training.loss_settings import Aggregation


def token_weights(
    mask: Tensor,
    rollouts: Tensor,
    aggregation: Aggregation = "token",
    *,
    constant_length: int | None = None,
    share: float = 1.0,
) -> Tensor:
    """Return the weight of each token in the loss; 0 where the mask is 0.

    Their sum is `share`; with `constant` it is the mean length of a rollout divided by `constant_length`. Rollouts and
    sequences without a masked token do not count.

    Shapes:
        mask: (B, T) true on the tokens to train.
        rollouts: (B,) equal for the rows of one rollout.
        result: (B, T) float32.

    Args:
        constant_length: tokens, for `constant`.
        share: the share of these rows in all rows that the step would train, see `StepRows.share`.

    Raises:
        ValueError: the mask is 0 everywhere, `aggregation` is unknown, or `constant` has no length.
    """
    trained = mask.float()  # (B, T)
    total = trained.sum()
    if total == 0:
        raise ValueError("The mask is 0 everywhere: no token is left to train on")
    if aggregation == "token":
        return trained * (share / total)
    if aggregation not in ("sequence", "rollout", "constant"):
        expected = "'token', 'sequence', 'rollout' or 'constant'"
        raise ValueError(f"aggregation must be {expected}; got {aggregation!r}")
    tokens_per_row = trained.sum(dim=1)  # (B,)
    if aggregation == "sequence":
        per_row = 1 / (tokens_per_row.clamp(min=1) * (tokens_per_row > 0).sum())  # (B,)
        return trained * per_row[:, None] * share
    _, members = rollouts.unique(return_inverse=True)  # (B,) 0 .. R-1
    tokens_per_rollout = tokens_per_row.new_zeros(int(members.max()) + 1).index_add_(0, members, tokens_per_row)  # (R,)
    trained_rollouts = (tokens_per_rollout > 0).sum()
    if aggregation == "constant":
        if constant_length is None:
            raise ValueError("aggregation='constant' requires constant_length, in tokens")
        return trained * (share / (trained_rollouts * constant_length))
    per_rollout = 1 / (tokens_per_rollout.clamp(min=1) * trained_rollouts)  # (R,)
    return trained * per_rollout[members][:, None] * share
