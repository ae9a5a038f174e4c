"""The metrics of an update: the values of each trained token in the loss, and the means over the optimizer steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from agentlightning.training.batch import Batch
from agentlightning.training.losses.objective import PolicyLoss

MEASURED_TOKENS = 2048
"""Approximate number of tokens of the forward pass after the last optimizer step, in rows spread over the batch."""


RowFigures = Mapping[str, NDArray[Any]]
"""The values of one row on the first pass over it, (R,) each, one per trained token in order. The names are those of
`LedgerRow`, which explains them. All are float32, except `clipped`, which is uint8. A trainer that does not expose its
loss (VERL) returns the inputs of the loss."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The metrics of an update."""

    figures: dict[str, float]
    """See `Policy.update`."""
    rows: list[RowFigures]
    """(B,) values of each row in the loss, in the order of the samples."""
    notes: list[str] = field(default_factory=list[str])
    """Messages for the user, such as a report of a lack of memory."""


def row_figures(batch: Batch, logprobs: Tensor, entropy: Tensor, loss: PolicyLoss) -> list[RowFigures]:
    """Return the token values of each row of `batch`; `logprobs` and `entropy` are (B, T), of the learner."""
    mask, tokens = batch.mask, loss.tokens
    columns = {
        "engine_logprobs": batch.logprobs,
        "trainer_logprobs": logprobs.detach(),
        "entropy": entropy.detach(),
        **{each.name: getattr(tokens, each.name) for each in dataclasses.fields(tokens)},
        "advantage": batch.advantages.expand_as(mask),
    }
    if batch.values is not None and batch.returns is not None:
        columns |= {"value": batch.values, "returns": batch.returns}
    ends = mask.sum(dim=1).cumsum(dim=0)[:-1].cpu().numpy()
    split = [np.split(column[mask].cpu().numpy(), ends) for column in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*split, strict=True)]


def summary(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the number of optimizer steps and the means over them, NaN without steps. For the first step also return
    the distance of engine and learner on fresh tokens, and the divergence on stale tokens, if any."""
    steps = [figure for figure in figures if figure["taken"]]
    names = ["loss", "clip_fraction", "approx_kl", "kl", "entropy", "grad_norm", "padding_share"]
    more = ("value_loss", "value_clip_fraction", "stale_kl", "fresh_kl", "stale_share")
    names += [name for name in more if name in figures[0]]
    if any(figure["masked_fraction"] for figure in figures):
        names.append("masked_fraction")
    means = {name: sum(figure[name] for figure in steps) / len(steps) if steps else float("nan") for name in names}
    stale = figures[0].get("stale_share", 0.0)
    if stale < 1.0:
        means["first_ratio_error"] = figures[0]["max_ratio_error"]
    if stale > 0.0:
        means["first_stale_kl"] = figures[0]["stale_kl"] / stale
    return means | {"steps": len(steps), "skipped_steps": len(figures) - len(steps)}


def measured_rows(lengths: Sequence[int]) -> list[int]:
    """Return the numbers of rows, spread over the batch, that have about `MEASURED_TOKENS` tokens in total."""
    return list(range(0, len(lengths), max(1, -(-sum(lengths) // MEASURED_TOKENS))))
