"""The forward pass of the decoder: runs prompts and tokens through the model, with a key-value cache of rows.

Rows 0 .. B-1 of the cache are the sequences being decoded, each with its own length. A new sequence uses the next row,
and the last row replaces a finished one, so that a step always works on the first B rows without padding on the left.
The buffers grow by doubling and are reused. The caches of transformers append to all rows at the same position, which
does not support sequences that start and end between two steps.
"""

from __future__ import annotations

import inspect
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import Cache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from agentlightning.engine.llama_forward import LlamaForward, grown, llama_forward_of
from agentlightning.engine.served import head_sees_only

SHARED_TOKENS: Final = 32
"""Minimum number of common tokens for a separate forward pass."""
_FULL: Final = "full_attention"
_PLAIN: Final = {_FULL, "sliding_attention"}


_llama_forwards: WeakKeyDictionary[PreTrainedModel, LlamaForward | None] = WeakKeyDictionary()


def forward_of(model: PreTrainedModel) -> ModelForward | LlamaForward:
    """Return the fastest forward pass that computes the same as the model, with its own rows."""
    if model not in _llama_forwards:
        _llama_forwards[model] = llama_forward_of(model, ModelForward)
    own = _llama_forwards[model]
    return ModelForward(model) if own is None else own.with_new_rows()


class ModelForward:
    """The model's own forward pass, which keeps keys and values in rows.
    Raises:
        ValueError: the model has layers that are not plain attention (state-space or linear attention layers).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.rows = RowCache(model.config)
        """The keys and values."""
        # transformers names it `cache` from 5.24 on, and drops the older name with 5.40
        name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
        self._cache: dict[str, Any] = {name: self.rows, "use_cache": True}
        self.shares_prefixes = set(getattr(model.config, "layer_types", None) or [_FULL]) == {_FULL}
        """Whether one call reads prompts with a common beginning faster."""

    def prompts(self, tokens: Tensor, last: Tensor, first_row: int) -> Tensor:
        """Write prompts to the rows from `first_row` on and return the logits after the last token of each.

        Shapes: tokens: (R, T), padded on the right; last: (R,) position of each prompt's last token; result: (R, V).
        """
        count, length = tokens.shape
        start, rest = self._read_prefix(tokens, last, first_row), dict[str, Tensor]()
        if start:
            position = torch.arange(start, length, device=tokens.device)  # (T - start,)
            visible = torch.arange(length, device=tokens.device) <= position[:, None]  # (T - start, T)
            rest = {"position_ids": position[None], "attention_mask": visible.expand(count, 1, -1, -1)}
        self.rows.prepare_prompts(first_row, start)
        positions = torch.arange(start, length, device=tokens.device) == last[:, None]  # (R, T - start)
        # logits at all positions of the prompts would be many times as large
        with head_sees_only(self._model, positions) as head_inputs:
            logits = self._model(input_ids=tokens[:, start:], **self._cache, **rest).logits
        return logits[0] if head_inputs else logits[positions]

    def _read_prefix(self, tokens: Tensor, last: Tensor, first_row: int) -> int:
        """Read the common beginning of all prompts once into all rows; return its length, 0 if it is short."""
        same = (tokens == tokens[0]).all(dim=0).long().cumprod(dim=0)  # (T,)
        shared = min(int(same.sum()), int(last.min()))  # at least the last token of each prompt remains
        if not self.shares_prefixes or len(tokens) == 1 or shared < SHARED_TOKENS:
            return 0
        self.rows.prepare_prompts(first_row)
        self._model(input_ids=tokens[:1, :shared], logits_to_keep=1, **self._cache)
        self.rows.repeat_row(first_row, len(tokens))
        return shared

    def tokens(self, tokens: Tensor, lengths: Tensor, width: int) -> Tensor:
        """Append a token to each of the first B rows and return the logits after it.

        Shapes: tokens, lengths: (B,), `lengths` counts the tokens before, at most `width` - 1; result: (B, V).
        """
        visible = torch.arange(width, device=lengths.device) <= lengths[:, None]  # (B, width): itself and all before it
        self.rows.prepare_tokens(lengths, width)
        output = self._model(
            input_ids=tokens[:, None],
            attention_mask=visible[:, None, None, :],
            position_ids=lengths[:, None],
            **self._cache,
        )
        return output.logits[:, -1]


class RowCache(Cache):
    """Keys and values of all layers. Owned by the thread that decodes; not thread-safe."""

    def __init__(self, config: PretrainedConfig) -> None:
        kinds = set(getattr(config, "layer_types", None) or [_FULL])
        if not kinds <= _PLAIN:
            raise ValueError(
                f"the embedded engine supports only plain attention layers; {config.model_type} also has "
                f"{', '.join(sorted(kinds - _PLAIN))}"
            )
        self._row_layers = [_RowLayer() for _ in range(config.num_hidden_layers)]
        super().__init__(layers=[*self._row_layers])

    def prepare_prompts(self, first_row: int, start: int = 0) -> None:
        """Prepare for prompts, which the next forward pass writes from position `start` and row `first_row` on."""
        for layer in self._row_layers:
            layer.prompts_at, layer.tokens_at = (first_row, start), None

    def prepare_tokens(self, lengths: Tensor, width: int) -> None:
        """Prepare for tokens, which the next forward pass appends to the first B rows, one each.

        `lengths`: (B,) number of tokens of each row; `width`: that of the longest row with the new token.
        """
        rows = torch.arange(len(lengths), device=lengths.device)
        for layer in self._row_layers:
            layer.tokens_at = rows, lengths, width

    def repeat_row(self, row: int, count: int) -> None:
        """Copy one row to the next `count` - 1 rows."""
        for layer in self._row_layers:
            layer.repeat(row, count)

    def move_row(self, source: int, target: int) -> None:
        """Copy one row over another."""
        for layer in self._row_layers:
            layer.keys[target], layer.values[target] = layer.keys[source], layer.values[source]


class _RowLayer(CacheLayerMixin):
    """One layer: keys and values (rows, heads, capacity, head width)."""

    prompts_at: tuple[int, int] = (0, 0)
    """First row and position of the next prompts."""
    tokens_at: tuple[Tensor, Tensor, int] | None = None
    """Rows (B,), lengths (B,) and width of the next single tokens; None before prompts."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write (b, heads, t, width) and return the keys and values that the queries may attend to."""
        count = len(key_states)
        if self.tokens_at is None:
            first, start = self.prompts_at
            end, place = start + key_states.shape[2], slice(first, first + count)
            self._reserve(key_states, value_states, place.stop, end)
            self.keys[place, :, start:end] = key_states
            self.values[place, :, start:end] = value_states
            return (self.keys[place, :, :end], self.values[place, :, :end]) if start else (key_states, value_states)
        rows, lengths, width = self.tokens_at
        self._reserve(key_states, value_states, count, width)
        self.keys[rows, :, lengths] = key_states[:, :, 0].to(self.keys.dtype)
        self.values[rows, :, lengths] = value_states[:, :, 0].to(self.values.dtype)
        return self.keys[:count, :, :width], self.values[:count, :, :width]

    def repeat(self, row: int, count: int) -> None:
        self._reserve(self.keys, self.values, row + count, 0)
        self.keys[row + 1 : row + count], self.values[row + 1 : row + count] = self.keys[row], self.values[row]

    def _reserve(self, keys: Tensor, values: Tensor, rows: int, length: int) -> None:
        """Allocate space with the types of the first values: under autocast keys and values have different types."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        have_rows, heads, have_length, width = self.keys.shape
        if rows > have_rows or length > have_length:
            shape = (grown(have_rows, rows), heads, grown(have_length, length), width)
            old_keys, self.keys = self.keys, self.keys.new_zeros(shape)
            old_values, self.values = self.values, self.values.new_zeros((*shape[:3], self.values.shape[3]))
            self.keys[:have_rows, :, :have_length] = old_keys
            self.values[:have_rows, :, :have_length] = old_values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        keys, values = (part.new_zeros(0, part.shape[1], 0, part.shape[3]) for part in (key_states, value_states))
        self.keys: Tensor = keys  # pyright: ignore[reportIncompatibleVariableOverride] -- there before its first use
        self.values: Tensor = values  # pyright: ignore[reportIncompatibleVariableOverride] -- the same
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (number of keys, offset) of a prompt; for single tokens the decoder passes its own mask."""
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1
