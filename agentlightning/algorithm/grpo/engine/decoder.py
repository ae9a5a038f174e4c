"""Samples from a causal model, many completions at a time: prompts join and finished ones leave between two steps.

What is sampled for a completion depends on its own seed and on the weights, not on the rest of the batch (but for the
last bits of floating point). No thread, no queue, no text: the engine adds those.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentlightning.algorithm.grpo.engine.kv_cache import RowCache

FinishReason = Literal["stop", "length"]

PREFILL_TOKENS: Final = 16_384  # padded prompt tokens of one forward, a bound on memory


@dataclass(slots=True, eq=False)
class Completion:
    """One completion, from its prompt to its last token.

    Attributes:
        prompt_ids: what the model reads first; at least one token.
        max_new_tokens: at most so many tokens are drawn; at least one is.
        temperature: 0 takes the likeliest token.
        top_p: sample from the smallest set of likeliest tokens that holds this much of the probability.
        seed: of the draws; same seed and weights, same tokens.
        token_ids: drawn so far, the end-of-sequence token included.
        logprobs: natural log-probability of each drawn token under softmax(logits / temperature) over the whole
            vocabulary (at temperature 0: that of temperature 1). `top_p` does not enter, so that the ratio to the same
            weights is one.
        finish_reason: None while it runs.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    finish_reason: FinishReason | None = None
    _random: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def next_uniform(self) -> float:
        """Return the next uniform number in [0, 1)."""
        return self._random.random()

    def append(self, token_id: int, logprob: float, eos_ids: Collection[int]) -> None:
        """Take the next token and see whether it is the last."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if token_id in eos_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.max_new_tokens:
            self.finish_reason = "length"


class Decoder:
    """The completions in flight over one model. Used by one thread at a time; the weights must rest meanwhile."""

    def __init__(self, model: PreTrainedModel, eos_ids: Collection[int]) -> None:
        self._model = model
        self._eos_ids = frozenset(eos_ids)
        self._cache = RowCache(model.config)
        self._running: list[Completion] = []  # row b of the cache belongs to the b-th

    def __len__(self) -> int:
        """Return how many completions are in flight."""
        return len(self._running)

    @torch.inference_mode()
    def add(self, completions: Sequence[Completion]) -> list[Completion]:
        """Read the prompts and sample the first token of each; return those that are finished with it.

        Prompts stand in the cache padded on the right.
        """
        for chunk in _chunks(completions):
            device = self._model.device
            last = torch.tensor([len(c.prompt_ids) - 1 for c in chunk], device=device)  # (P,)
            length = int(last.max()) + 1
            tokens = torch.tensor([[*c.prompt_ids, *([0] * (length - len(c.prompt_ids)))] for c in chunk])
            kept, place = last.unique(return_inverse=True)  # (U,) whose logits are wanted, (P,) which is whose
            self._cache.prepare_prompts(len(self._running))
            output = self._model(
                input_ids=tokens.to(device), past_key_values=self._cache, use_cache=True, logits_to_keep=kept
            )
            logits = output.logits[torch.arange(len(place), device=device), place]  # (P, V)
            del output  # its logits are many times as large: (P, U, V)
            self._running.extend(chunk)
            self._append(chunk, logits)
        return self._remove_finished()

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Sample one more token of each completion in flight; return those that are finished with it."""
        if not self._running:
            return []
        device = self._model.device
        tokens = torch.tensor([[c.token_ids[-1]] for c in self._running], device=device)  # (B, 1)
        lengths = torch.tensor([len(c.prompt_ids) + len(c.token_ids) - 1 for c in self._running], device=device)  # (B,)
        width = int(lengths.max()) + 1
        visible = torch.arange(width, device=device) <= lengths[:, None]  # (B, width): itself and all before it
        self._cache.prepare_tokens(lengths, width)
        output = self._model(
            input_ids=tokens,
            attention_mask=visible[:, None, None, :],
            position_ids=lengths[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        self._append(self._running, output.logits[:, -1])
        return self._remove_finished()

    def clear(self) -> list[Completion]:
        """Drop everything in flight and return it, unfinished."""
        dropped, self._running = self._running, []
        return dropped

    def _append(self, completions: Sequence[Completion], logits: Tensor) -> None:
        token_ids, logprobs = _sample(logits.float(), completions)
        if not all(map(math.isfinite, logprobs)):
            raise FloatingPointError("the model gives no finite probabilities: its weights are broken")
        for completion, token_id, logprob in zip(completions, token_ids, logprobs, strict=True):
            completion.append(token_id, logprob, self._eos_ids)

    def _remove_finished(self) -> list[Completion]:
        finished = [completion for completion in self._running if completion.finish_reason]
        for row in range(len(self._running) - 1, -1, -1):
            if self._running[row].finish_reason:
                last = self._running.pop()
                if row < len(self._running):
                    self._cache.move_row(len(self._running), row)
                    self._running[row] = last
        return finished


def generate(decoder: Decoder, completions: Sequence[Completion], max_batch: int = 128) -> None:
    """Run the completions to their end, at most `max_batch` at a time."""
    waiting = list(completions)
    while waiting or len(decoder):
        free = max_batch - len(decoder)
        if waiting and free:
            decoder.add(waiting[:free])
            del waiting[:free]
        decoder.step()


def _sample(logits: Tensor, completions: Sequence[Completion]) -> tuple[list[int], list[float]]:
    """Sample one token per row by inverting the cumulative distribution at the row's own uniform number.

    Shapes: logits: (B, V) float32; the lists have length B.
    """
    greedy = torch.tensor([c.temperature == 0 for c in completions], device=logits.device)  # (B,)
    temperature = torch.tensor([c.temperature or 1.0 for c in completions], device=logits.device)  # (B,)
    logprobs = (logits / temperature[:, None]).log_softmax(dim=-1)  # (B, V)
    likely = logprobs.exp().double()
    if any(c.top_p < 1 for c in completions):  # 0 for what lies outside the smallest set that reaches top_p
        top_p = torch.tensor([c.top_p for c in completions], device=logits.device)  # (B,)
        ordered, order = likely.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered  # (B, V) probability of all that are likelier
        likely = torch.zeros_like(likely).scatter(1, order, torch.where(before < top_p[:, None], ordered, 0.0))
    cumulative = likely.cumsum(dim=-1)
    uniform = torch.tensor([c.next_uniform() for c in completions], dtype=torch.float64, device=logits.device)
    wanted = uniform[:, None] * cumulative[:, -1:]  # below the total, so the token found has a probability above 0
    drawn = torch.searchsorted(cumulative, wanted, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy, logits.argmax(dim=-1), drawn)  # (B,)
    return tokens.tolist(), logprobs.gather(1, tokens[:, None])[:, 0].tolist()


def _chunks(completions: Sequence[Completion]) -> Iterator[list[Completion]]:
    chunk: list[Completion] = []
    longest = 0
    for completion in completions:
        longest = max(longest, len(completion.prompt_ids))
        if chunk and longest * (len(chunk) + 1) > PREFILL_TOKENS:
            yield chunk
            chunk, longest = [], len(completion.prompt_ids)
        chunk.append(completion)
    if chunk:
        yield chunk
