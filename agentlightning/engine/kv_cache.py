"""A key-value cache of rows that come and go: the memory behind continuous batching.

Rows 0 .. B-1 are the sequences in flight, each with its own length. A new sequence takes the next row, a finished one
gives its place to the last row, so that a step always works on the first B rows and nothing is ever padded on the left.
The buffers grow by doubling and are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from transformers import Cache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin

_PLAIN_LAYERS: Final = {"full_attention", "sliding_attention"}


class RowCache(Cache):
    """Keys and values of all layers. Owned by the thread that decodes; not thread-safe."""

    def __init__(self, config: PretrainedConfig) -> None:
        """Make an empty cache.

        Raises:
            ValueError: The model has layers that are not plain attention (state-space or linear attention layers).
        """
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if not kinds <= _PLAIN_LAYERS:
            raise ValueError(
                f"the embedded engine serves models with plain attention layers; {config.model_type} also has "
                f"{', '.join(sorted(kinds - _PLAIN_LAYERS))}"
            )
        self._row_layers = [_RowLayer() for _ in range(config.num_hidden_layers)]
        super().__init__(layers=[*self._row_layers])

    def prepare_prompts(self, first_row: int, start: int = 0) -> None:
        """Let the next forward write prompts, from position `start` on, to the rows from `first_row` on."""
        for layer in self._row_layers:
            layer.prepare(slice(first_row, None), None, start)

    def prepare_tokens(self, lengths: Tensor, width: int) -> None:
        """Let the next forward append one token to each of the first B rows.

        `lengths`: (B,) tokens that each row already has; `width`: tokens of the longest with the new one.
        """
        rows = torch.arange(len(lengths), device=lengths.device)
        for layer in self._row_layers:
            layer.prepare(rows, lengths, width)

    def spread_rows(self, first_row: int, sources: Sequence[int]) -> None:
        """Copy rows so that the i-th from `first_row` on holds what the `sources[i]`-th from there held."""
        for layer in self._row_layers:
            layer.spread(first_row, sources)

    def move_row(self, source: int, target: int) -> None:
        """Copy one row over another."""
        for layer in self._row_layers:
            layer.keys[target], layer.values[target] = layer.keys[source], layer.values[source]


class FlatRows:
    """The same rows for a forward without modules: all layers in one tensor, a key head of a row as one block.

    Buffer: (2 * layers, rows, key heads, capacity, head width), the keys of a layer before its values.
    """

    def __init__(self, layers: int, heads: int, width: int) -> None:
        self._kept = torch.zeros(2 * layers, 0, heads, 0, width)
        self._flat: Sequence[Tensor] = ()
        self._places = torch.zeros(0, dtype=torch.int64)

    def write_prompts(self, layer: int, first_row: int, keys: Tensor, values: Tensor) -> None:
        """Write a layer's prompts, (R, heads, T, width), from position 0 on to the rows from `first_row` on."""
        rows, length = first_row + len(keys), keys.shape[2]
        self._reserve(rows, length)
        self._kept[2 * layer, first_row:rows, :, :length] = keys
        self._kept[2 * layer + 1, first_row:rows, :, :length] = values

    def prepare_tokens(self, lengths: Tensor, width: int) -> Sequence[Tensor]:
        """Let `write_tokens` append to the first B rows; return, for each layer, its keys and its values.

        Shapes: lengths: (B,) tokens that each row already has; each result: (B * heads, width, head width).
        """
        rows = len(lengths)
        self._reserve(rows, width)
        _, _, heads, capacity, _ = self._kept.shape
        count = rows * heads
        self._places = lengths.repeat_interleave(heads) + torch.arange(0, count * capacity, capacity)  # (B * heads,)
        return self._kept.flatten(1, 2)[:, :count, :width].unbind(0)

    def write_tokens(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Append a token of one layer to each row: (B, heads, width)."""
        width = keys.shape[-1]
        self._flat[2 * layer].index_copy_(0, self._places, keys.reshape(-1, width))
        self._flat[2 * layer + 1].index_copy_(0, self._places, values.reshape(-1, width))

    def spread_rows(self, first_row: int, sources: Sequence[int]) -> None:
        """As `RowCache.spread_rows`."""
        self._reserve(first_row + len(sources), 0)
        self._kept[:, first_row : first_row + len(sources)] = self._kept[:, torch.tensor(sources) + first_row]

    def move_row(self, source: int, target: int) -> None:
        """Copy one row over another."""
        self._kept[:, target] = self._kept[:, source]

    def _reserve(self, rows: int, length: int) -> None:
        parts, have_rows, heads, have_length, width = self._kept.shape
        if rows <= have_rows and length <= have_length:
            return
        grown = self._kept.new_zeros(parts, _grown(have_rows, rows), heads, _grown(have_length, length), width)
        grown[:, :have_rows, :, :have_length] = self._kept
        self._kept, self._flat = grown, grown.flatten(1, 3).unbind(0)


class _RowLayer(CacheLayerMixin):
    """One layer: keys and values (rows, heads, capacity, head width)."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: slice | Tensor = slice(0, None)
        self._lengths: Tensor | None = None
        self._width = 0

    def prepare(self, rows: slice | Tensor, lengths: Tensor | None, width: int) -> None:
        self._rows, self._lengths, self._width = rows, lengths, width

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write (b, heads, t, width) and return what the queries may look at."""
        if self._lengths is None:
            assert isinstance(self._rows, slice)
            start, end = self._width, self._width + key_states.shape[2]
            rows = slice(self._rows.start, self._rows.start + key_states.shape[0])
            self._reserve(key_states, value_states, rows.stop, end)
            self.keys[rows, :, start:end] = key_states
            self.values[rows, :, start:end] = value_states
            return (self.keys[rows, :, :end], self.values[rows, :, :end]) if start else (key_states, value_states)
        count = len(self._lengths)
        self._reserve(key_states, value_states, count, self._width)
        self.keys[self._rows, :, self._lengths] = key_states[:, :, 0].to(self.keys.dtype)
        self.values[self._rows, :, self._lengths] = value_states[:, :, 0].to(self.values.dtype)
        return self.keys[:count, :, : self._width], self.values[:count, :, : self._width]

    def spread(self, first: int, sources: Sequence[int]) -> None:
        self._reserve(self.keys, self.values, first + len(sources), 0)
        rows = torch.tensor(sources, device=self.keys.device) + first
        target = slice(first, first + len(sources))
        self.keys[target], self.values[target] = self.keys[rows], self.values[rows]  # copied before it is written

    def _reserve(self, keys: Tensor, values: Tensor, rows: int, length: int) -> None:
        """Make room, for numbers of the types of the first ones: autocast gives keys and values different types."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        have_rows, _, have_length, _ = self.keys.shape
        if rows <= have_rows and length <= have_length:
            return
        grown = (_grown(have_rows, rows), keys.shape[1], _grown(have_length, length), keys.shape[3])
        self.keys, self.values = _enlarged(self.keys, grown), _enlarged(self.values, grown)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        _, heads, _, width = key_states.shape
        keys, values = key_states.new_zeros(0, heads, 0, width), value_states.new_zeros(0, heads, 0, width)
        self.keys: Tensor = keys  # pyright: ignore[reportIncompatibleVariableOverride] -- there before its first use
        self.values: Tensor = values  # pyright: ignore[reportIncompatibleVariableOverride] -- the same
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (keys to look at, offset) of a prompt; for single tokens the decoder passes its own mask."""
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


def _grown(have: int, wanted: int) -> int:
    return have if wanted <= have else max(wanted, 2 * have)


def _enlarged(old: Tensor, shape: Sequence[int]) -> Tensor:
    new = old.new_zeros(shape)
    new[: old.shape[0], :, : old.shape[2]] = old
    return new
