"""One completion: its request, the sampling of its tokens, and the rules for its end.

The tokens of the row, and their log-probabilities, are exactly those that were sampled. If a stop text ends in the
middle of a token, the row has the full token, but the reply does not have the text of the token after the stop text, as
in vLLM. If the agent sends back the truncated text, the next prompt does not begin with the row's tokens, and a new row
begins (a seam, which the ledger counts).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

DecodeText = Callable[[Sequence[int]], str]
"""A function that returns the text of tokens, including special ones."""
_SHOWN_CHARS: Final = 1000  # of a message of the grammar library
_UNFINISHED: Final = "\ufffd"  # the decoded form of bytes of an incomplete character


class GrammarError(ValueError):
    """A completion cannot continue within its grammar."""


class GrammarState:
    """The position of one completion in its grammar. Used by the decoding thread."""

    def __init__(self, matcher: Any, unknown_id: int | None) -> None:
        self._matcher = matcher
        self._unknown_id = unknown_id

    @property
    def is_whole(self) -> bool:
        """True if the text so far satisfies the grammar."""
        return self._matcher.is_accepting()

    def allowed(self, vocabulary: int) -> Tensor:
        """Return a mask of the tokens that may come next, with the end-of-sequence tokens if the text may end.

        Shapes: result: (V,) bool.

        Raises:
            GrammarError: no token is allowed, or the grammar exceeds the library's limits.
        """
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")[:vocabulary]
        if self._unknown_id is not None and self._unknown_id < len(bits):
            bits[self._unknown_id] = 0  # it represents text that is not in the vocabulary
        if self._matcher.is_error():
            raise GrammarError(f"cannot follow the schema: {shortened(self._matcher.get_error())}")
        if not bits.any():
            raise GrammarError("the model's vocabulary has no token that the schema allows next")
        return torch.from_numpy(np.pad(bits, (0, vocabulary - len(bits))).astype(bool))

    def accept(self, token_id: int) -> None:
        """Advance by the sampled token, which must be allowed."""
        self._matcher.consume_token(token_id)

    def fresh(self) -> GrammarState:
        """Return an independent copy of the state."""
        return GrammarState(self._matcher.deep_copy(), self._unknown_id)


def shortened(message: str) -> str:
    """Return the first part of a message of the grammar library."""
    first = message.split("\n<state>")[0].strip()
    return first if len(first) <= _SHOWN_CHARS else f"{first[:_SHOWN_CHARS]} ..."


class Stopped(NamedTuple):
    """The end of a reply by its stop rule."""

    text: str
    reason: str | int | None
    """The stop text or token; None for the end of a single tool call."""


@dataclass(frozen=True, slots=True)
class StopRule:
    """Stop texts and stop tokens; a text may end inside a token and span several tokens."""

    texts: tuple[str, ...] = ()
    """Stop texts; none is empty."""
    token_ids: frozenset[int] = frozenset()
    included: bool = False
    """Whether the stop text is part of the reply (`include_stop_str_in_output`)."""
    min_tokens: int = 0
    """Smallest number of tokens before the reply may end."""
    last_call: str | None = None
    """Text that closes a tool call, if only one is allowed; part of the reply."""

    def stopped(self, token_ids: Sequence[int], decode: DecodeText) -> Stopped | None:
        """Return the end of the reply if the last of its tokens ends it."""
        if len(token_ids) < self.min_tokens:
            return None
        *earlier, last = token_ids
        if last in self.token_ids:
            reply_ids = token_ids if self.included else earlier
            return Stopped(decode(reply_ids) if reply_ids else "", last)
        stops = self.texts if self.last_call is None else (*self.texts, self.last_call)
        # a character takes four tokens at most; the first tokens of the window may be cut and are longer than needed
        window = decode(token_ids[-(4 * max(map(len, stops)) + 8) :]) if stops else ""
        if not any(stop in window for stop in stops):
            return None  # as after nearly every token
        text, earlier_length = decode(token_ids), len(decode(earlier).rstrip(_UNFINISHED)) if earlier else 0
        places = [(text.find(stop, max(0, earlier_length - len(stop) + 1)), stop) for stop in stops]
        # the one that is complete first
        at, stop = min(places, key=lambda place: (place[0] < 0, place[0] + len(place[1]), place[0]))
        if at < 0:
            return None
        if stop == self.last_call and stop not in self.texts:
            return Stopped(text[: at + len(stop)], None)
        return Stopped(text[: at + len(stop)] if self.included else text[:at], stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustments:
    """Changes of the distribution from which tokens are sampled. The defaults have no effect.

    Applied in vLLM's order: the grammar's mask, `min_tokens` and `logit_bias`; the penalties (OpenAI's, and the one of
    CTRL, arXiv:1909.05858, section 4.1, for tokens in prompt or reply); the temperature; `min_p`, `top_k`, `top_p`.
    """

    top_k: int = 0
    """Number of likeliest tokens to sample from; 0 for all."""
    min_p: float = 0.0
    """Minimum probability of a token, as a share of that of the likeliest token."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it was sampled."""
    presence_penalty: float = 0.0
    """Subtracted from a token's logit if it was sampled."""
    repetition_penalty: float = 1.0
    """Divides positive logits, multiplies negative ones."""
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    """Added to the logits of these tokens."""
    min_tokens: int = 0
    """Smallest number of tokens before the reply may end."""
    ends: frozenset[int] = frozenset()
    """Tokens that end the reply, excluded until `min_tokens`."""

    def reshape(self, logits: Tensor, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Change the logits of the token after `prompt_ids` and the sampled `token_ids`, in place.

        Shapes: logits: (V,).
        """
        if len(token_ids) < self.min_tokens:
            held_back = logits.clone()
            held_back[list(self.ends)] = -torch.inf
            if held_back.isfinite().any():  # a grammar may allow nothing but the end
                logits.copy_(held_back)
        if self.logit_bias:
            tokens = torch.tensor(list(self.logit_bias), device=logits.device)
            logits[tokens] += torch.tensor(list(self.logit_bias.values()), dtype=logits.dtype, device=logits.device)
        if self.repetition_penalty != 1:
            tokens = torch.tensor(sorted({*prompt_ids, *token_ids}), device=logits.device)
            values = logits[tokens]
            logits[tokens] = torch.where(values > 0, values / self.repetition_penalty, values * self.repetition_penalty)
        if token_ids and (self.frequency_penalty or self.presence_penalty):
            counts = Counter(token_ids)
            tokens = torch.tensor(list(counts), device=logits.device)
            times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
            logits[tokens] -= self.frequency_penalty * times + self.presence_penalty

    def truncate(self, likely: Tensor) -> None:
        """Set the probabilities that `min_p` and `top_k` exclude to 0, in place, and scale the rest to a sum of one.

        Shapes: likely: (V,).
        """
        if self.min_p:
            likely[likely < self.min_p * likely.max()] = 0.0
        if 0 < self.top_k < len(likely):
            likely[likely < likely.topk(self.top_k).values[-1]] = 0.0
        likely /= likely.sum()


@dataclass(slots=True, eq=False)
class Completion:
    """One completion, from its prompt to its last token.

    **The log-probabilities are the model's own**: under softmax(logits / temperature) over the whole vocabulary (at
    temperature 0: that of temperature 1), before `top_p`, `adjustments` and `grammar`. These change the sampled token,
    not the recorded probability, like vLLM's `raw_logprobs`. The learner recomputes the probability of each token with
    the model only, so the ratio to the same weights is one; with the probability under a mask it would be below one
    from the first update on. The disadvantage is that such tokens are sampled from another distribution than the
    learner's, and no importance weight corrects it. The gateway records these settings on the call
    (`agentlightning.call.constrained_by`), and the ledger counts such calls.
    """

    prompt_ids: Sequence[int]
    """At least one token."""
    max_new_tokens: int
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """Sample from the smallest set of likeliest tokens that has this probability."""
    seed: int = 0
    """Seed of sampling: the same seed and weights give the same tokens."""
    adjustments: Adjustments | None = None
    stop: StopRule | None = None
    grammar: GrammarState | None = None
    top_logprobs: int = 0
    """Number of likeliest tokens recorded for each sampled one."""

    token_ids: list[int] = field(default_factory=list[int])
    """Tokens sampled so far, including the end-of-sequence token."""
    logprobs: list[float] = field(default_factory=list[float])
    """Natural log-probability of each sampled token."""
    likeliest: list[list[tuple[int, float]]] = field(default_factory=list[list[tuple[int, float]]])
    """The `top_logprobs` likeliest tokens for each sampled one, (token, log-probability), likeliest first."""
    finish_reason: Literal["stop", "length"] | None = None
    """Finish reason; None while the completion runs."""
    stop_reason: str | int | None = None
    """The stop text or stop token that ended it."""
    stopped_text: str | None = None
    """The text of the reply that `stop` ended."""
    error: str | None = None
    """Reason why it cannot continue."""
    left: bool = False
    """Whether its client has disconnected; may be set from any thread."""
    rng: random.Random = field(init=False, repr=False)
    """Source of one number per sampled token."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    @property
    def is_over(self) -> bool:
        """True if no further token is sampled."""
        return self.finish_reason is not None or self.error is not None or self.left

    @property
    def read_ids(self) -> Sequence[int]:
        """Ids that the model reads before the next token: the prompt, then the sampled tokens."""
        return [*self.prompt_ids, *self.token_ids] if self.token_ids else self.prompt_ids

    @property
    def is_reshaped(self) -> bool:
        """True if the distribution depends on more than temperature and `top_p`."""
        return self.adjustments is not None or self.grammar is not None

    def append(self, token_id: int, logprob: float, eos_ids: Collection[int], decode: DecodeText) -> None:
        """Append the next token and check whether it is the last."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if token_id in eos_ids:
            self.finish_reason = "stop"
            return
        if self.grammar is not None:
            self.grammar.accept(token_id)
        if self.stop is not None and (stopped := self.stop.stopped(self.token_ids, decode)):
            self.finish_reason, (self.stopped_text, self.stop_reason) = "stop", stopped
        elif len(self.token_ids) >= self.max_new_tokens:
            self.finish_reason = "length"


def draw(logits: Tensor, completions: Sequence[Completion]) -> tuple[list[int], list[float]]:
    """Sample one token per row by inverting the cumulative distribution at the row's uniform random number.

    Records the likeliest tokens of completions that request them. A completion without an allowed token gets its
    `error`, and the values returned for it are meaningless.

    Shapes: logits: (B, V) float32; the lists have length B.
    """
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
    if any(c.top_p < 1 for c in completions):  # 0 for tokens outside the smallest set that reaches top_p
        top_p = torch.tensor([c.top_p for c in completions], device=logits.device)  # (B,)
        ordered, order = likely.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered  # (B, V) probability of all that are likelier
        likely = torch.zeros_like(likely).scatter(1, order, torch.where(before < top_p[:, None], ordered, 0.0))
    cumulative = likely.cumsum(dim=-1)
    uniform = torch.tensor([c.rng.random() for c in completions], dtype=torch.float64, device=logits.device)
    targets = uniform[:, None] * cumulative[:, -1:]  # below the total, so the token has a probability above 0
    tokens = torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)  # (B,)
    greedy = [c.temperature == 0 for c in completions]
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
