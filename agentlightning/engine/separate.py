"""Decoding by which a reply does not depend on what else is in flight: every completion has shapes of its own.

The sums of a matrix product are rounded in an order that depends on the shapes of the operands. In a batch these follow
from who else is in it, and so would the last bits of every probability, and now and then a token. Here each completion
is read and decoded alone, in a key-value cache of its own: all shapes, strides and alignments follow from the request.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from transformers import PreTrainedModel

from agentlightning.engine.completion import Completion
from agentlightning.engine.decoder import Decoder
from agentlightning.engine.request.stopping import DecodeText


class SeparateDecoder:
    """Decodes as `Decoder` does, each completion alone. Costs as many forwards per token as there are completions."""

    def __init__(self, model: PreTrainedModel, eos_ids: Collection[int], decode: DecodeText | None = None) -> None:
        self._model, self._eos_ids, self._decode = model, eos_ids, decode
        self._running: list[Decoder] = []

    def __len__(self) -> int:
        return len(self._running)

    def add(self, completions: Sequence[Completion]) -> list[Completion]:
        """Read the prompts and sample the first token of each; return those that are finished with it."""
        finished: list[Completion] = []
        for completion in completions:
            decoder = Decoder(self._model, self._eos_ids, self._decode)
            finished += decoder.add([completion])
            if len(decoder):
                self._running.append(decoder)
        return finished

    def step(self) -> list[Completion]:
        """Sample one more token of each completion in flight; return those that are finished with it."""
        finished = [completion for decoder in self._running for completion in decoder.step()]
        self._running = [decoder for decoder in self._running if len(decoder)]
        return finished

    def clear(self) -> list[Completion]:
        """Drop everything in flight and return it, unfinished."""
        dropped = [completion for decoder in self._running for completion in decoder.clear()]
        self._running = []
        return dropped
