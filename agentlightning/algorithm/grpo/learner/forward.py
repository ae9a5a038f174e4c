"""Log-probabilities and entropies of the trained tokens of a batch, from one forward of the model."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentlightning.algorithm.grpo.learner.batch import Batch
from agentlightning.algorithm.grpo.learner.packing import packed_inputs


def score(
    model: PreTrainedModel, batch: Batch, temperature: float, *, packed: bool, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of the masked tokens, 0 elsewhere.

    Shapes: (B, T) each, float32. Logits are made for the masked tokens alone, and their softmax is taken in float32,
    whatever the weights are in.
    """
    predicting = batch.mask.roll(-1, dims=1)  # (B, T): token t is predicted at t-1; the first is never masked
    if packed:
        inputs = packed_inputs(batch.tokens, batch.attention)
        predicting = predicting[batch.attention.bool()][None]  # (1, S)
    else:
        inputs = {"input_ids": batch.tokens, "attention_mask": batch.attention}
    logits = _logits(model, inputs, predicting).float()  # (N, V), N masked tokens, row by row
    distribution = (logits if temperature == 1.0 else logits / temperature).log_softmax(dim=-1)  # (N, V)
    del logits
    chosen = distribution.gather(1, batch.tokens[batch.mask][:, None])[:, 0]  # (N,)
    with nullcontext() if entropy_gradient else torch.no_grad():
        entropy = -(distribution.exp() * distribution).sum(dim=-1)  # (N,)
    empty = torch.zeros(batch.mask.shape, device=chosen.device)
    return empty.masked_scatter(batch.mask, chosen), empty.masked_scatter(batch.mask, entropy)


def _logits(model: PreTrainedModel, inputs: dict[str, Any], wanted: Tensor) -> Tensor:
    """Return the logits at the wanted positions: (N, V). `wanted`: (B, T) bool."""
    with head_sees_only(model, wanted) as seen:
        logits = cast("Tensor", model(**inputs, use_cache=False).logits)
    return logits[0] if seen else logits[wanted]


@contextmanager
def head_sees_only(model: PreTrainedModel, wanted: Tensor) -> Generator[list[bool]]:
    """Let the output layer see the hidden states at the wanted positions alone, as a batch of one; what a model does to
    its logits beside stays as it is. The list is empty if the layer was not asked."""
    seen: list[bool] = []

    def select(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(True)
        return inputs[0][wanted][None], *inputs[1:]

    head = cast("torch.nn.Module | None", model.get_output_embeddings())
    hook = None if head is None else head.register_forward_pre_hook(select)
    try:
        yield seen
    finally:
        if hook is not None:
            hook.remove()
