"""Samples from a causal model, many completions at a time. Completions start and end between two steps.

The tokens of a completion depend on its own seed and on the weights, not on the rest of the batch (except for rounding;
with `separate` not even for rounding). The engine adds threads and text.

transformers' own continuous batching is not suitable: it has one random generator for all requests, while each
completion here has its own seed, grammar and stop texts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentlightning.engine.completion import Completion, DecodeText, draw
from agentlightning.engine.forward import SHARED_TOKENS, forward_of

PREFILL_TOKENS: Final = 16_384  # padded prompt tokens of one forward, a bound on memory


class Decoder:
    """The running and waiting completions of one model. Used by one thread; the weights must not change during a step.

    With `separate` each completion is decoded alone, at the cost of one forward pass per token and completion. The
    rounding of a matrix product depends on the shapes of the operands. In a batch the shapes depend on the other
    completions, and so do the last bits of every probability and sometimes a token. Without a batch, all shapes,
    strides and alignments depend only on the request.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_ids: Collection[int],
        decode: DecodeText | None = None,
        *,
        max_batch: int = 128,
        separate: bool = False,
    ) -> None:
        """Create an empty decoder; at most `max_batch` completions run concurrently. Stop texts require `decode`."""
        self._new_batch = partial(_Batch, model, frozenset(eos_ids), decode or _no_text)
        self._separate, self._max_batch = separate, max_batch
        self._batches = [] if separate else [self._new_batch()]
        self._waiting: deque[Completion] = deque()

    def __len__(self) -> int:
        return self.running + len(self._waiting)

    @property
    def running(self) -> int:
        """Number of completions for which the next step samples a token."""
        return sum(len(batch.running) for batch in self._batches)

    def add(self, completions: Sequence[Completion]) -> None:
        """Queue completions. A completion that already has tokens continues after them."""
        self._waiting.extend(completions)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Sample a token of each running completion, start waiting ones, and return the finished ones."""
        finished = [completion for batch in self._batches for completion in batch.step()]
        free = min(max(0, self._max_batch - self.running), len(self._waiting))
        new = [self._waiting.popleft() for _ in range(free)]
        if not self._separate:
            return finished + self._batches[0].start(new)
        for completion in new:
            self._batches.append(self._new_batch())
            finished += self._batches[-1].start([completion])
        self._batches = [batch for batch in self._batches if batch.running]
        return finished


def generate(decoder: Decoder, completions: Sequence[Completion]) -> None:
    """Run the completions to their end."""
    decoder.add(completions)
    while len(decoder):
        decoder.step()


class _Batch:
    """Completions that share their forward passes."""

    def __init__(self, model: PreTrainedModel, eos_ids: frozenset[int], decode: DecodeText) -> None:
        self._model, self._eos_ids, self._decode = model, eos_ids, decode
        self._forward = forward_of(model)
        self.running: list[Completion] = []  # row b of the forward's belongs to the b-th

    def start(self, completions: Sequence[Completion]) -> list[Completion]:
        """Read the prompts and sample the first token of each; return the finished completions."""
        device = self._model.device
        for chunk in _chunks(completions, share=self._forward.shares_prefixes):
            prompts = [completion.read_ids for completion in chunk]  # (R,)
            last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)  # (R,)
            length = max(map(len, prompts))
            tokens = torch.tensor([[*prompt, *([0] * (length - len(prompt)))] for prompt in prompts])
            logits = self._forward.prompts(tokens.to(device), last, len(self.running))  # (R, V)
            self.running.extend(chunk)
            self._append(chunk, logits)
        return self._remove_finished()

    def step(self) -> list[Completion]:
        """Sample one more token of each completion; return the finished ones."""
        finished = self._remove_finished()  # their clients have left
        if not self.running:
            return finished
        device = self._model.device
        tokens = torch.tensor([c.token_ids[-1] for c in self.running], device=device)  # (B,)
        before = [len(c.prompt_ids) + len(c.token_ids) - 1 for c in self.running]
        lengths = torch.tensor(before, device=device)  # (B,)
        self._append(self.running, self._forward.tokens(tokens, lengths, max(before) + 1))
        return finished + self._remove_finished()

    def _append(self, completions: Sequence[Completion], logits: Tensor) -> None:
        token_ids, logprobs = draw(logits.float(), completions)
        if not all(map(math.isfinite, logprobs)):
            raise FloatingPointError("the model returns no finite probabilities: its weights are not usable")
        for completion, token_id, logprob in zip(completions, token_ids, logprobs, strict=True):
            if completion.error is None:
                completion.append(token_id, logprob, self._eos_ids, self._decode)

    def _remove_finished(self) -> list[Completion]:
        finished = [completion for completion in self.running if completion.is_over]
        over = set(finished)  # a client may leave between two checks
        for row in range(len(self.running) - 1, -1, -1) if finished else ():
            if self.running[row] in over:
                last = self.running.pop()
                if row < len(self.running):
                    self._forward.rows.move_row(len(self.running), row)
                    self.running[row] = last
        return finished


def _chunks(completions: Sequence[Completion], *, share: bool) -> Iterator[list[Completion]]:
    """Yield the completions whose prompts one forward pass reads. With `share`, prompts with a common beginning form a
    chunk, without prompts that would shorten that beginning by more than `SHARED_TOKENS`."""
    waiting = sorted(completions, key=lambda completion: list(completion.read_ids)) if share else list(completions)
    chunk: list[Completion] = []
    longest = shared = 0  # tokens of the longest prompt, and tokens that all of the chunk begin with
    for completion, after in zip(waiting, [*waiting[1:], None], strict=False):
        length = len(completion.read_ids)
        longest = max(longest, length)
        common = lost = 0
        if chunk and share:
            common = min(shared, _common(chunk[0], completion))
            ahead = 0 if after is None else _common(completion, after)
            lost = max((len(chunk) - 1) * (shared - common), ahead - common)
        if chunk and (longest * (len(chunk) + 1) > PREFILL_TOKENS or lost > SHARED_TOKENS):
            yield chunk
            chunk, longest = [], length
        shared = common if chunk else length
        chunk.append(completion)
    if chunk:
        yield chunk


def _common(one: Completion, other: Completion) -> int:
    """Return the number of tokens of the common beginning of two prompts."""
    pairs = zip(one.read_ids, other.read_ids, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one.read_ids), len(other.read_ids)))


def _no_text(token_ids: Sequence[int]) -> str:
    raise TypeError("a decoder without `decode` cannot find stop texts")
