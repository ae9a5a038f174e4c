"""The log-probabilities and entropies of the trained tokens of a batch.

Rows go through the model padded or packed. Packed rows form one sequence without padding. Positions restart with each
row, and attention is computed row by row, so that rows do not attend to each other. TRL calls this `padding_free`, VERL
`use_remove_padding`; there it needs flash attention, here torch's own scaled-dot-product attention on any device. A
model that bypasses transformers' attention interface cannot be packed; `can_pack` compares the results to detect it.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentlightning.engine.served import head_sees_only
from agentlightning.training.batch import Batch
from agentlightning.training.learner.parameters import ValueHead


class Scores(NamedTuple):
    """The results of a forward pass for each masked token: (B, T) each, 0 elsewhere."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor
    """Values of the states before the tokens; 0 without a value head."""


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

    Shapes: (B, T) each, float32. Logits are computed only for the masked tokens, and their softmax in float32 for every
    type of weights.
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
    logprobs = distribution.gather(1, batch.tokens[batch.mask][:, None])[:, 0]  # (N,)
    with nullcontext() if entropy_gradient else torch.no_grad():
        entropy = -(distribution.exp() * distribution).sum(dim=-1)  # (N,)
    values = empty = torch.zeros(batch.mask.shape, device=logprobs.device)
    if head is not None:
        if not hidden:
            raise ValueError("A value head requires a model that computes logits with its output layer")
        values = empty.masked_scatter(batch.mask, head(hidden[0][0]))
    return Scores(empty.masked_scatter(batch.mask, logprobs), empty.masked_scatter(batch.mask, entropy), values)


def _logits(model: PreTrainedModel, inputs: dict[str, Any], positions: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the logits at the selected positions, (N, V), and the inputs of the output layer: one of (1, N, H), none
    if the layer was not called. `positions`: (B, T) bool."""
    with head_sees_only(model, positions) as head_inputs:
        logits = cast("Tensor", model(**inputs, use_cache=False).logits)
    return (logits[0] if head_inputs else logits[positions]), head_inputs


BY_ROWS: Final = "agl_by_rows"
"""Name of the attention that can separate rows; without `row_lengths` it is transformers' `sdpa`."""


def _attention_by_rows(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    row_lengths: list[int] | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention, within each row separately if `row_lengths` has the rows of the sequence.

    Shapes: query: (B, heads, S, head width); key, value: the same with as many or fewer heads; B = 1 and
        S = sum(row_lengths) if those are given; result: (B, S, heads, head width).
    """
    if query.is_cuda and query.dtype == torch.float32 and key.shape[1] < query.shape[1]:
        # float32 has no kernel on CUDA for heads that share keys; the fallback would store all scores
        key, value = (states.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for states in (key, value))
        module = cast("torch.nn.Module", SimpleNamespace(is_causal=getattr(module, "is_causal", True)))
    if row_lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    rows = zip(*(states.split(row_lengths, dim=2) for states in (query, key, value)), strict=True)
    return torch.cat([sdpa_attention_forward(module, q, k, v, None, **settings)[0] for q, k, v in rows], dim=1), None


AttentionInterface.register(BY_ROWS, _attention_by_rows)
AttentionMaskInterface.register(BY_ROWS, sdpa_mask)


def packed_inputs(tokens: Tensor, attention: Tensor) -> dict[str, Any]:
    """Return the arguments of a call of the model on all rows in one sequence without padding.

    Shapes: tokens, attention: (B, T); in the result (1, S) with S = attention.sum().
    """
    real = attention.bool()
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return {
        "input_ids": tokens[real][None],
        "position_ids": positions[real][None],
        # a mask of four dimensions is taken as it is: without, transformers would make one of S x S for packed rows
        "attention_mask": torch.ones((1, 1, 1, 1), dtype=torch.bool, device=tokens.device),
        "row_lengths": cast("list[int]", attention.sum(dim=1).tolist()),
    }


@torch.no_grad()
def can_pack(model: PreTrainedModel) -> bool:
    """Switch the model to attention by rows and return whether it separates two rows; if not, switch it back."""
    before = model.config._attn_implementation  # pyright: ignore[reportPrivateUsage] -- it has no public name
    if before == BY_ROWS:
        return True
    if before != "sdpa":
        return False
    rows = torch.tensor([[1, 2, 3, 2, 1], [3, 1, 2, 0, 0]], device=model.device) % model.config.vocab_size
    attention = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], device=model.device)
    other_first = rows.clone()
    other_first[0] = rows[0].flip(0).roll(1)
    try:
        padded = model(input_ids=rows, attention_mask=attention, use_cache=False).logits[attention.bool()]  # (8, V)
        _bare(model).set_attn_implementation(BY_ROWS)
        packed, beside = (
            model(**packed_inputs(tokens, attention), use_cache=False).logits[0] for tokens in (rows, other_first)
        )
        tolerance = (1e-4 if packed.dtype == torch.float32 else 3e-2) * float(padded.abs().max())
        if torch.equal(packed[5:], beside[5:]) and torch.allclose(packed, padded, rtol=0, atol=tolerance):
            return True
    except (TypeError, ValueError, RuntimeError):  # its forward does not accept these arguments, or their shapes
        pass
    _bare(model).set_attn_implementation(before)
    return False


def _bare(model: Any) -> Any:
    """Return the transformers model within adapters of peft, which have no `set_attn_implementation` of their own."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
