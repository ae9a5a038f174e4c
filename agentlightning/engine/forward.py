"""One forward of the model for the decoder: through the model itself, or for small ones of Llama's layout directly.

A model of a quarter of a million parameters computes a token in a tenth of the time that its modules take to call each
other, and each tensor operation gives the interpreter lock away, which a busy process returns late. So small Llama
models are computed here with a third of the operations, on the weights of the model as they are at each forward.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from typing import Any, Final, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedModel

from agentlightning.engine.kv_cache import FlatRows, RowCache
from agentlightning.engine.served import head_sees_only
from agentlightning.engine.torch_setup import SMALL_MODEL_PARAMETERS

logger = logging.getLogger(__name__)

_STATIC_ROPE: Final = ("default", "linear", "llama3")  # whose angles depend on the position alone
_MOST_POSITIONS: Final = 32_768
SHARED_TOKENS: Final = 32
"""A common beginning of fewer tokens is not worth a forward of its own."""
FULL: Final = "full_attention"
_TOLERANCE: Final = 1e-4


class Forward(Protocol):
    """Gives logits, and keeps keys and values in rows: those in flight are the first ones, without gaps."""

    def prompts(self, tokens: Tensor, last: Tensor, first_row: int) -> Tensor:
        """Write prompts to the rows from `first_row` on and return the logits after the last token of each.

        Shapes: tokens: (R, T), padded on the right; last: (R,) the place of each prompt's last token; result: (R, V).
        """
        ...

    def tokens(self, tokens: Tensor, lengths: Tensor, width: int) -> Tensor:
        """Append a token to each of the first B rows and return the logits after it.

        Shapes: tokens, lengths: (B,), `lengths` are the tokens before, at most `width` - 1; result: (B, V).
        """
        ...

    @property
    def rows(self) -> RowCache | FlatRows:
        """The keys and values."""
        ...

    @property
    def shares_prefixes(self) -> bool:
        """True if prompts with a common beginning are read faster in one call."""
        ...


class ModelForward:
    """The model's own forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.rows = RowCache(model.config)
        # transformers names it `cache` from 5.24 on, and drops the older name with 5.40
        name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
        self._cache: dict[str, Any] = {name: self.rows, "use_cache": True}
        self.shares_prefixes = set(getattr(model.config, "layer_types", None) or [FULL]) == {FULL}

    def prompts(self, tokens: Tensor, last: Tensor, first_row: int) -> Tensor:
        count, length = tokens.shape
        start, rest = self._read_prefix(tokens, last, first_row), dict[str, Tensor]()
        if start:
            position = torch.arange(start, length, device=tokens.device)  # (T - start,)
            visible = torch.arange(length, device=tokens.device) <= position[:, None]  # (T - start, T)
            rest = {"position_ids": position[None], "attention_mask": visible.expand(count, 1, -1, -1)}
        self.rows.prepare_prompts(first_row, start)
        wanted = torch.arange(start, length, device=tokens.device) == last[:, None]  # (R, T - start)
        with head_sees_only(self._model, wanted) as seen:  # logits of all prompts' places would be many times as large
            logits = self._model(input_ids=tokens[:, start:], **self._cache, **rest).logits
        return logits[0] if seen else logits[wanted]

    def _read_prefix(self, tokens: Tensor, last: Tensor, first_row: int) -> int:
        """Read what all prompts begin with once, into the rows of all; return how many tokens that is, 0 for few."""
        same = (tokens == tokens[0]).all(dim=0).long().cumprod(dim=0)  # (T,)
        shared = min(int(same.sum()), int(last.min()))  # of each prompt at least the last token is left
        if not self.shares_prefixes or len(tokens) == 1 or shared < SHARED_TOKENS:
            return 0
        self.rows.prepare_prompts(first_row)
        self._model(input_ids=tokens[:1, :shared], logits_to_keep=1, **self._cache)
        self.rows.spread_rows(first_row, [0] * len(tokens))
        return shared

    def tokens(self, tokens: Tensor, lengths: Tensor, width: int) -> Tensor:
        visible = torch.arange(width, device=lengths.device) <= lengths[:, None]  # (B, width): itself and all before it
        self.rows.prepare_tokens(lengths, width)
        output = self._model(
            input_ids=tokens[:, None],
            attention_mask=visible[:, None, None, :],
            position_ids=lengths[:, None],
            **self._cache,
        )
        return output.logits[:, -1]


_Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Takes the number of a layer, queries (N, heads, width), keys and values (N, key heads, width); gives (N, D)."""


class LlamaForward:
    """The forward of `LlamaForCausalLM` without its modules; differs from theirs in the last bits of floating point."""

    shares_prefixes = False

    def __init__(self, model: LlamaForCausalLM) -> None:
        body, config = cast("Any", model.model), model.config
        self._embedding: Tensor = body.embed_tokens.weight  # (V, D)
        self._head: Tensor = model.lm_head.weight  # (V, D)
        self._norm: Tensor = body.norm.weight
        self._epsilon = torch.tensor(config.rms_norm_eps)
        self._mean = torch.full((len(self._norm), 1), 1 / len(self._norm))
        self._heads: int = config.num_attention_heads
        self._key_heads: int = config.num_key_value_heads or self._heads
        self._width: int = body.layers[0].self_attn.head_dim
        self._layers = [
            (
                (layer.input_layernorm.weight, layer.post_attention_layernorm.weight),
                [(part.weight, part.bias) for part in (own.q_proj, own.k_proj, own.v_proj, own.o_proj)],
                [(part.weight, part.bias) for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)],
            )
            for layer in body.layers
            for own, mlp in ((layer.self_attn, layer.mlp),)
        ]
        cosine, sine = body.rotary_emb(self._embedding, torch.arange(config.max_position_embeddings)[None])
        sign = torch.tensor([-1.0, 1.0]).repeat_interleave(self._width // 2)  # of the half that is turned
        self._cosine, self._sine = cosine[0, :, None], (sine[0] * sign)[:, None]  # (positions, 1, width)
        self.rows = FlatRows(len(self._layers), self._key_heads, self._width)

    def with_new_rows(self) -> LlamaForward:
        """Return the same with rows of its own."""
        other = copy.copy(self)
        other.rows = FlatRows(len(self._layers), self._key_heads, self._width)
        return other

    def prompts(self, tokens: Tensor, last: Tensor, first_row: int) -> Tensor:
        count, places = tokens.shape
        position = torch.arange(places).repeat(count)  # (R * T,)

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            shape = (count, places, -1, self._width)
            queries, keys, values = (part.view(shape).transpose(1, 2) for part in (queries, keys, values))
            self.rows.write_prompts(layer, first_row, keys, values)
            grouped = self._heads != self._key_heads
            found = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=grouped)
            return found.transpose(1, 2).reshape(count * places, -1)

        hidden = self._hidden(tokens.view(-1), position, attend)  # (R * T, D)
        return self._logits(hidden[last + torch.arange(count) * places])

    def tokens(self, tokens: Tensor, lengths: Tensor, width: int) -> Tensor:
        hidden_keys = torch.arange(width) > lengths[:, None]  # (B, width): after itself
        mask = torch.zeros(hidden_keys.shape).masked_fill_(hidden_keys, -torch.inf)
        mask = mask.repeat_interleave(self._key_heads, 0)[:, None]  # (B * key heads, 1, width)
        kept = self.rows.prepare_tokens(lengths, width)
        scale = self._width**-0.5

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self.rows.write_tokens(layer, keys, values)
            all_keys, all_values = kept[2 * layer : 2 * layer + 2]  # (B * key heads, width, head width)
            grouped = queries.reshape(len(all_keys), -1, self._width)
            weights = torch.baddbmm(mask, grouped, all_keys.transpose(1, 2), alpha=scale).softmax(-1)
            return torch.bmm(weights, all_values).view(len(lengths), -1)

        return self._logits(self._hidden(tokens, lengths, attend))

    def _logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(self._rms_norm(hidden, self._norm), self._head)

    def _rms_norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return what `functional.rms_norm` does, for (N, D), in half its time: the mean is a matrix product."""
        return hidden * torch.addmm(self._epsilon, hidden.square(), self._mean).rsqrt_() * weight

    def _hidden(self, tokens: Tensor, position: Tensor, attend: _Attend) -> Tensor:
        """Return what the last layer gives for tokens (N,) at their positions (N,): (N, D)."""
        linear, count = functional.linear, len(tokens)
        cosine, sine = self._cosine[position], self._sine[position]
        hidden = functional.embedding(tokens, self._embedding)
        for layer, ((norm, second_norm), (query, key, value, out), (gate, up, down)) in enumerate(self._layers):
            normed = self._rms_norm(hidden, norm)
            both = torch.cat((linear(normed, *query), linear(normed, *key)), -1).view(count, -1, self._width)
            turned = torch.addcmul(both * cosine, both.roll(self._width // 2, -1), sine)
            values = linear(normed, *value).view(count, -1, self._width)
            queries, keys = turned.split((self._heads, self._key_heads), 1)
            hidden = hidden + linear(attend(layer, queries, keys, values), *out)
            normed = self._rms_norm(hidden, second_norm)
            hidden = hidden + linear(functional.silu(linear(normed, *gate)).mul_(linear(normed, *up)), *down)
        return hidden


_direct: WeakKeyDictionary[PreTrainedModel, LlamaForward | None] = WeakKeyDictionary()


def forward_of(model: PreTrainedModel) -> Forward:
    """Return the fastest forward that computes what the model does, with rows of its own; tried out once per model."""
    if model not in _direct:
        _direct[model] = _direct_forward(model)
    known = _direct[model]
    return ModelForward(model) if known is None else known.with_new_rows()


@torch.inference_mode()
def _direct_forward(model: PreTrainedModel) -> LlamaForward | None:
    if not _has_llama_layout(model):
        return None
    direct = LlamaForward(cast("LlamaForCausalLM", model))
    count = min(8, model.config.vocab_size, model.config.max_position_embeddings)
    tokens, last = torch.arange(count)[None], torch.tensor([count - 1])
    own, other = (forward.prompts(tokens, last, 0) for forward in (ModelForward(model), direct))
    if torch.allclose(own, other, rtol=_TOLERANCE, atol=_TOLERANCE):
        return direct
    logger.info("the model computes other probabilities than its layout says; it is decoded through its own modules")
    return None


def _has_llama_layout(model: PreTrainedModel) -> bool:
    if type(model) is not LlamaForCausalLM or model.device.type != "cpu" or model.dtype != torch.float32:
        return False
    config, projections = model.config, ("_proj", "lm_head")
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    return (
        model.num_parameters() < SMALL_MODEL_PARAMETERS
        and config.hidden_act == "silu"
        and rope in _STATIC_ROPE
        and config.max_position_embeddings <= _MOST_POSITIONS
        and all(type(part) is torch.nn.Linear for name, part in model.named_modules() if name.endswith(projections))
    )  # an adapter that does nothing yet would pass the comparison, and learn later
