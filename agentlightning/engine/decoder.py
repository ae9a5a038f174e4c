"""Samples from a causal model, many completions at a time: prompts join and finished ones leave between two steps.

What is sampled for a completion depends on its own seed and on the weights, not on the rest of the batch (but for the
last bits of floating point). No thread, no queue, no text: the engine adds those.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentlightning.engine.completion import Completion
from agentlightning.engine.forward import SHARED_TOKENS, forward_of
from agentlightning.engine.request.grammar import GrammarError
from agentlightning.engine.request.stopping import DecodeText

PREFILL_TOKENS: Final = 16_384  # padded prompt tokens of one forward, a bound on memory


class Decoder:
    """The completions in flight over one model. Used by one thread at a time; the weights must rest meanwhile."""

    def __init__(self, model: PreTrainedModel, eos_ids: Collection[int], decode: DecodeText | None = None) -> None:
        """Begin with nothing in flight. `decode` is asked by completions that end at a stop text or token."""
        self._model = model
        self._eos_ids = frozenset(eos_ids)
        self._decode = decode or _no_text
        self._forward = forward_of(model)
        self._running: list[Completion] = []  # row b of the forward's belongs to the b-th

    def __len__(self) -> int:
        """Return how many completions are in flight."""
        return len(self._running)

    @torch.inference_mode()
    def add(self, completions: Sequence[Completion]) -> list[Completion]:
        """Read the prompts and sample the first token of each; return those that are finished with it. A completion
        that has tokens already, from before a `clear`, goes on after them.

        Prompts stand in the cache padded on the right. One that several completions share is read once.
        """
        for chunk in _chunks(completions, SHARED_TOKENS if self._forward.shares_prefixes else None):
            device = self._model.device
            numbers: dict[int, int] = {}
            read = [c.read_ids for c in chunk]
            rows = [numbers.setdefault(id(ids), len(numbers)) for ids in read]  # (P,) which prompt is whose
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
        """Sample one more token of each completion in flight; return those that are finished with it."""
        left = self._remove_finished()  # nobody waits for them any more
        if not self._running:
            return left
        device = self._model.device
        tokens = torch.tensor([c.token_ids[-1] for c in self._running], device=device)  # (B,)
        before = [len(c.prompt_ids) + len(c.token_ids) - 1 for c in self._running]
        lengths = torch.tensor(before, device=device)  # (B,)
        self._append(self._running, self._forward.tokens(tokens, lengths, max(before) + 1))
        return left + self._remove_finished()

    def clear(self) -> list[Completion]:
        """Drop everything in flight and return it, unfinished."""
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


def generate(decoder: Decoder, completions: Sequence[Completion], max_batch: int = 128) -> None:
    """Run the completions to their end, at most `max_batch` at a time."""
    waiting = list(completions)
    while waiting or len(decoder):
        free = max_batch - len(decoder)
        if waiting and free:
            decoder.add(waiting[:free])
            del waiting[:free]
        decoder.step()


def draw(logits: Tensor, completions: Sequence[Completion]) -> tuple[list[int], list[float]]:
    """Sample one token per row by inverting the cumulative distribution at the row's own uniform number.

    Notes the likeliest tokens of those that want them. A completion for which there is no token gets its `error`, and
    what is returned for it means nothing.

    Shapes: logits: (B, V) float32; the lists have length B.
    """
    greedy = [c.temperature == 0 for c in completions]
    temperatures = [c.temperature or 1.0 for c in completions]
    scaled = logits
    if any(temperature != 1.0 for temperature in temperatures):
        scaled = logits / torch.tensor(temperatures, device=logits.device)[:, None]
    logprobs = scaled.log_softmax(dim=-1)  # (B, V)
    scores, likely = logits, logprobs.exp().double()
    reshaped = [row for row, completion in enumerate(completions) if completion.is_reshaped]
    if reshaped:
        scores = logits.clone()
        for row in reshaped:
            _reshape(scores[row], completions[row])
            likely[row] = (scores[row] / temperatures[row]).softmax(dim=-1).double()
            if (adjustments := completions[row].adjustments) is not None:
                adjustments.truncate(likely[row])
    if any(c.top_p < 1 for c in completions):  # 0 for what lies outside the smallest set that reaches top_p
        top_p = torch.tensor([c.top_p for c in completions], device=logits.device)  # (B,)
        ordered, order = likely.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered  # (B, V) probability of all that are likelier
        likely = torch.zeros_like(likely).scatter(1, order, torch.where(before < top_p[:, None], ordered, 0.0))
    cumulative = likely.cumsum(dim=-1)
    uniform = torch.tensor([c.next_uniform() for c in completions], dtype=torch.float64, device=logits.device)
    wanted = uniform[:, None] * cumulative[:, -1:]  # below the total, so the token found has a probability above 0
    tokens = torch.searchsorted(cumulative, wanted, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)  # (B,)
    if any(greedy):
        tokens = torch.where(torch.tensor(greedy, device=logits.device), scores.argmax(dim=-1), tokens)
    for row, completion in enumerate(completions):
        if completion.top_logprobs:
            best = logprobs[row].topk(completion.top_logprobs)
            completion.likeliest.append(list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
    return tokens.tolist(), logprobs.gather(1, tokens[:, None])[:, 0].tolist()


def _reshape(logits: Tensor, completion: Completion) -> None:
    if completion.grammar is not None:
        try:
            allowed = completion.grammar.allowed(len(logits))
        except GrammarError as error:
            completion.error = str(error)
            return
        logits.masked_fill_(~allowed.to(logits.device), -torch.inf)
    if completion.adjustments is not None:
        completion.adjustments.reshape(logits, completion.prompt_ids, completion.token_ids)


def _chunks(completions: Sequence[Completion], fewest_shared: int | None) -> Iterator[list[Completion]]:
    """Yield what is read together; apart where a common beginning of more tokens than that would be lost by it."""
    chunk: list[Completion] = []
    longest = shared = 0  # tokens of the longest prompt, and tokens that all of the chunk begin with
    waiting = list(completions)
    if fewest_shared is not None:
        waiting.sort(key=lambda completion: list(completion.read_ids))
    for completion, after in zip(waiting, [*waiting[1:], None], strict=False):
        longest = max(longest, len(completion.read_ids))
        left = min(shared, _common(chunk[0], completion)) if chunk and fewest_shared is not None else 0
        lost = 0
        if chunk and fewest_shared is not None:
            ahead = _common(completion, after) if after is not None else 0
            lost = max((len(chunk) - 1) * (shared - left), ahead - left)
        if chunk and (longest * (len(chunk) + 1) > PREFILL_TOKENS or lost > (fewest_shared or 0)):
            yield chunk
            chunk, longest = [], len(completion.read_ids)
        shared = left if chunk else len(completion.read_ids)
        chunk.append(completion)
    if chunk:
        yield chunk


def _common(one: Completion, other: Completion) -> int:
    """Return how many tokens both prompts begin with."""
    pairs = zip(one.read_ids, other.read_ids, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one.read_ids), len(other.read_ids)))


def _no_text(token_ids: Sequence[int]) -> str:
    raise TypeError("a decoder without `decode` has no text in which a stop text could be found")
