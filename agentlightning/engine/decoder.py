"""Samples from a causal model, many completions at a time: prompts join and finished ones leave between two steps.

The tokens of a completion depend on its own seed and on the weights, not on the rest of the batch (but for the last
bits of floating point; with `SeparateDecoder` not even for these). No thread, no queue, no text: the engine adds those.

transformers' own continuous batching does not serve here: it has one random generator for all requests, while each
completion here has a seed, a grammar and stop texts of its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentlightning.engine.completion import Completion, DecodeText, draw
from agentlightning.engine.forward import SHARED_TOKENS, forward_of

PREFILL_TOKENS: Final = 16_384  # padded prompt tokens of one forward, a bound on memory


class Decoder:
    """The completions being decoded over one model. Used by one thread at a time; the weights must rest meanwhile."""

    def __init__(self, model: PreTrainedModel, eos_ids: Collection[int], decode: DecodeText | None = None) -> None:
        """Begin with no completion. Completions that end at a stop text or token need `decode`."""
        self._model = model
        self._eos_ids = frozenset(eos_ids)
        self._decode = decode or _no_text
        self._forward = forward_of(model)
        self._running: list[Completion] = []  # row b of the forward's belongs to the b-th

    def __len__(self) -> int:
        return len(self._running)

    @torch.inference_mode()
    def add(self, completions: Sequence[Completion]) -> list[Completion]:
        """Read the prompts and sample the first token of each; return those that are finished with it. A completion
        that has tokens already, from before a `clear`, goes on after them.

        Prompts are in the cache padded on the right. One that several completions share is read once.
        """
        for chunk in _chunks(completions, share=self._forward.shares_prefixes):
            device = self._model.device
            numbers: dict[int, int] = {}
            read = [c.read_ids for c in chunk]
            rows = [numbers.setdefault(id(ids), len(numbers)) for ids in read]  # (P,) the prompt of each completion
            prompts = list({id(ids): ids for ids in read}.values())  # (R,)
            last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)  # (R,)
            length = max(map(len, prompts))
            tokens = torch.tensor([[*prompt, *([0] * (length - len(prompt)))] for prompt in prompts])
            logits = self._forward.prompts(tokens.to(device), last, len(self._running))  # (R, V)
            if len(prompts) < len(chunk):
                self._forward.rows.spread_rows(len(self._running), rows)
                logits = logits[torch.tensor(rows, device=device)]  # (P, V)
            self._running.extend(chunk)
            self._append(chunk, logits)
        return self._remove_finished()

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Sample one more token of each completion; return those that are finished with it."""
        finished = self._remove_finished()  # nobody waits for them any more
        if not self._running:
            return finished
        device = self._model.device
        tokens = torch.tensor([c.token_ids[-1] for c in self._running], device=device)  # (B,)
        before = [len(c.prompt_ids) + len(c.token_ids) - 1 for c in self._running]
        lengths = torch.tensor(before, device=device)  # (B,)
        self._append(self._running, self._forward.tokens(tokens, lengths, max(before) + 1))
        return finished + self._remove_finished()

    def clear(self) -> list[Completion]:
        """Drop all completions and return them, unfinished."""
        dropped, self._running = self._running, []
        return dropped

    def _append(self, completions: Sequence[Completion], logits: Tensor) -> None:
        token_ids, logprobs = draw(logits.float(), completions)
        if not all(map(math.isfinite, logprobs)):
            raise FloatingPointError("the model gives no finite probabilities: its weights are broken")
        for completion, token_id, logprob in zip(completions, token_ids, logprobs, strict=True):
            if completion.error is None:
                completion.append(token_id, logprob, self._eos_ids, self._decode)

    def _remove_finished(self) -> list[Completion]:
        finished = [completion for completion in self._running if completion.is_over]
        over = set(finished)  # one may be left between two looks
        for row in range(len(self._running) - 1, -1, -1) if finished else ():
            if self._running[row] in over:
                last = self._running.pop()
                if row < len(self._running):
                    self._forward.rows.move_row(len(self._running), row)
                    self._running[row] = last
        return finished


class SeparateDecoder:
    """Decodes as `Decoder` does, each completion alone. Costs as many forwards per token as there are completions.

    The sums of a matrix product are rounded in an order that depends on the shapes of the operands. In a batch these
    follow from the rest of it, and so would the last bits of every probability, and now and then a token. Here every
    completion has a key-value cache of its own: all shapes, strides and alignments follow from the request.
    """

    def __init__(self, model: PreTrainedModel, eos_ids: Collection[int], decode: DecodeText | None = None) -> None:
        self._model, self._eos_ids, self._decode = model, eos_ids, decode
        self._running: list[Decoder] = []

    def __len__(self) -> int:
        return len(self._running)

    def add(self, completions: Sequence[Completion]) -> list[Completion]:
        """As `Decoder.add`."""
        finished: list[Completion] = []
        for completion in completions:
            decoder = Decoder(self._model, self._eos_ids, self._decode)
            finished += decoder.add([completion])
            if len(decoder):
                self._running.append(decoder)
        return finished

    def step(self) -> list[Completion]:
        """As `Decoder.step`."""
        finished = [completion for decoder in self._running for completion in decoder.step()]
        self._running = [decoder for decoder in self._running if len(decoder)]
        return finished

    def clear(self) -> list[Completion]:
        """As `Decoder.clear`."""
        dropped = [completion for decoder in self._running for completion in decoder.clear()]
        self._running = []
        return dropped


def generate(decoder: Decoder | SeparateDecoder, completions: Sequence[Completion], max_batch: int = 128) -> None:
    """Run the completions to their end, at most `max_batch` at a time."""
    waiting = list(completions)
    while waiting or len(decoder):
        free = max_batch - len(decoder)
        if waiting and free:
            decoder.add(waiting[:free])
            del waiting[:free]
        decoder.step()


def _chunks(completions: Sequence[Completion], *, share: bool) -> Iterator[list[Completion]]:
    """Yield the completions whose prompts one forward reads. With `share`, prompts that begin alike come together, and
    apart from others where these would make the beginning shorter by more than `SHARED_TOKENS`."""
    waiting = sorted(completions, key=lambda completion: list(completion.read_ids)) if share else list(completions)
    chunk: list[Completion] = []
    longest = shared = 0  # tokens of the longest prompt, and tokens that all of the chunk begin with
    for completion, after in zip(waiting, [*waiting[1:], None], strict=False):
        length = len(completion.read_ids)
        longest = max(longest, length)
        left = lost = 0
        if chunk and share:
            left = min(shared, _common(chunk[0], completion))
            ahead = 0 if after is None else _common(completion, after)
            lost = max((len(chunk) - 1) * (shared - left), ahead - left)
        if chunk and (longest * (len(chunk) + 1) > PREFILL_TOKENS or lost > SHARED_TOKENS):
            yield chunk
            chunk, longest = [], length
        shared = left if chunk else length
        chunk.append(completion)
    if chunk:
        yield chunk


def _common(one: Completion, other: Completion) -> int:
    """Return how many tokens both prompts begin with."""
    pairs = zip(one.read_ids, other.read_ids, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one.read_ids), len(other.read_ids)))


def _no_text(token_ids: Sequence[int]) -> str:
    raise TypeError("a decoder without `decode` has no text in which a stop text could be found")
