"""Log-probabilities and entropies of the trained tokens of a batch, from one forward of the model."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentlightning.engine.served import head_sees_only
from agentlightning.training.learner.batch import Batch
from agentlightning.training.learner.packing import packed_inputs
from agentlightning.training.learner.value_head import ValueHead


class Scores(NamedTuple):
    """What a forward gives of each masked token: (B, T) each, 0 elsewhere."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor
    """Of the state before the token; 0 without a value head."""


def score(
    model: PreTrainedModel,
    batch: Batch,
    temperature: float,
    *,
    packed: bool,
    entropy_gradient: bool = False,
    head: ValueHead | None = None,
) -> Scores:
    """Return log-probabilities and entropies of the masked tokens, 0 elsewhere, and their values if there is a head.

    Shapes: (B, T) each, float32. Logits are made for the masked tokens alone, and their softmax is taken in float32,
    whatever the weights are in.
    """
    predicting = batch.mask.roll(-1, dims=1)  # (B, T): token t is predicted at t-1; the first is never masked
    if packed:
        inputs = packed_inputs(batch.tokens, batch.attention)
        predicting = predicting[batch.attention.bool()][None]  # (1, S)
    else:
        inputs = {"input_ids": batch.tokens, "attention_mask": batch.attention}
    logits, hidden = _logits(model, inputs, predicting)
    logits = logits.float()  # (N, V), N masked tokens, row by row
    distribution = (logits if temperature == 1.0 else logits / temperature).log_softmax(dim=-1)  # (N, V)
    del logits
    chosen = distribution.gather(1, batch.tokens[batch.mask][:, None])[:, 0]  # (N,)
    with nullcontext() if entropy_gradient else torch.no_grad():
        entropy = -(distribution.exp() * distribution).sum(dim=-1)  # (N,)
    empty = torch.zeros(batch.mask.shape, device=chosen.device)
    values = empty if head is None else empty.masked_scatter(batch.mask, head(_states(hidden)))
    return Scores(empty.masked_scatter(batch.mask, chosen), empty.masked_scatter(batch.mask, entropy), values)


def _states(hidden: list[Tensor]) -> Tensor:
    if not hidden:
        raise ValueError("a value head needs a model whose output layer is asked for the logits; this one's is not")
    return hidden[0][0]


def _logits(model: PreTrainedModel, inputs: dict[str, Any], wanted: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the logits at the wanted positions, (N, V), and what the output layer made them of: one of (1, N, H), none
    if it was not asked. `wanted`: (B, T) bool."""
    with head_sees_only(model, wanted) as seen:
        logits = cast("Tensor", model(**inputs, use_cache=False).logits)
    return (logits[0] if seen else logits[wanted]), seen
