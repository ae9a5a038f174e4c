"""Micro-batches of limited size, in which rows are passed through the model; a lack of memory makes them smaller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from agentlightning.engine.torch_setup import free_cached_memory, is_out_of_memory, short_cause
from agentlightning.errors import OutOfMemoryError
from agentlightning.training.batch import Batch

_T = TypeVar("_T")


class MicroBatches:
    """Splits batches into micro-batches, and after a lack of memory retries with smaller ones."""

    def __init__(self, device: torch.device, max_tokens: int, release: Callable[[], None]) -> None:
        """Set the maximum number of tokens; `release` frees the gradients of a failed attempt."""
        self._device, self._release = device, release
        self.max_tokens = max_tokens
        """Maximum number of tokens of a micro-batch, halved after each lack of memory."""
        self.notes: list[str] = []
        """Messages for the user."""
        self._latest: list[Batch] = []
        """The current micro-batch; none before the first of an attempt."""

    def split(self, batch: Batch, *, packed: bool) -> Iterator[tuple[list[int], Batch]]:
        """Yield the micro-batches of a batch, each with the indices of its rows."""
        lengths: list[int] = batch.attention.sum(dim=1).tolist()
        for rows in microbatches(lengths, self.max_tokens, packed=packed):
            part = batch.rows(torch.tensor(rows, device=batch.tokens.device))
            self._latest = [part]
            yield rows, part

    def retry(self, attempt: Callable[[], _T]) -> _T:
        """Return the result of an attempt; after a lack of memory retry it with smaller micro-batches.

        Raises:
            OutOfMemoryError: a single row does not fit into the memory.
        """
        while True:
            self._latest.clear()
            try:
                return attempt()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or not self._latest:
                    raise
                failed, cause = self._latest[0], short_cause(error)
            self._shrink(failed, cause)  # here the frames of the error are gone, and their tensors with them

    def _shrink(self, failed: Batch, cause: str) -> None:
        """Set the bound to half the tokens of the failed forward pass."""
        self._release()
        rows, tokens = len(failed.tokens), int(failed.attention.sum())
        free_cached_memory(self._device)
        if rows == 1:
            raise OutOfMemoryError(
                f"one row of {tokens} tokens does not fit into the memory of {self._device} ({cause}); this optimizer "
                "step changed no weights. Try gradient_checkpointing=True, lora={'r': 16}, bf16=True, or shorter rows"
            )
        self.max_tokens = tokens // 2
        self.notes.append(
            f"out of memory with {rows} rows of {tokens} tokens in one forward pass ({cause}); retrying the optimizer "
            f"step from the same weights with at most {self.max_tokens} tokens per forward pass. Set "
            f"max_tokens_per_forward={self.max_tokens} to start with this limit"
        )


def microbatches(lengths: Sequence[int], max_tokens: int, *, packed: bool) -> list[list[int]]:
    """Return the indices of the rows that are passed through the model together: few tokens, little padding.

    Rows are sorted from the longest to the shortest; rows of the same length keep their order. A micro-batch holds at
    most `max_tokens` tokens, including padding; a longer row has its own micro-batch.

    Shapes: lengths: (B,) tokens of each row; the lists hold each of 0 .. B-1 once.
    """
    parts: list[list[int]] = []
    size = longest = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        grown = size + lengths[row] if packed else longest * (len(parts[-1]) + 1 if parts else 1)
        if not parts or grown > max_tokens:
            parts.append([])
            size, longest = 0, lengths[row]
        parts[-1].append(row)
        size += lengths[row]
    return parts
