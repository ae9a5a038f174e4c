"""One completion of the embedded engine: what is asked, what has been drawn, and when it is over."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from agentlightning.engine.request.adjustments import Adjustments
    from agentlightning.engine.request.grammar import GrammarState
    from agentlightning.engine.request.stopping import DecodeText, StopRule

FinishReason = Literal["stop", "length"]


@dataclass(slots=True, eq=False)
class Completion:
    """One completion, from its prompt to its last token.

    **The log-probabilities are the model's own**: under softmax(logits / temperature) over the whole vocabulary (at
    temperature 0: that of temperature 1), before `top_p`, `adjustments` and `grammar`. These change what is drawn, not
    what is recorded, as vLLM's `raw_logprobs` do not contain them either. The learner recomputes the probability of
    each token with the model alone, so the ratio to the same weights is one; with the probability under a mask it
    would be below one from the first update on, by as much as the mask took away. The price: such tokens are samples
    of another distribution than the one that learns from them, and no importance weight corrects it. The gateway
    notes the settings that do so on the call (`agentlightning.call.constrained_by`), and the ledger counts such calls.

    Attributes:
        prompt_ids: what the model reads first; at least one token. Completions that share the very same list are
            read once when they start together.
        max_new_tokens: at most so many tokens are drawn; at least one is.
        temperature: 0 takes the likeliest token.
        top_p: sample from the smallest set of likeliest tokens that holds this much of the probability.
        seed: of the draws; same seed and weights, same tokens.
        adjustments: what else changes the distribution; None for nothing.
        stop: what ends it beside the end-of-sequence tokens; None for nothing.
        grammar: what the text must be; None for anything.
        top_logprobs: so many of the likeliest tokens are noted for each drawn one.
        token_ids: drawn so far, the end-of-sequence token included.
        logprobs: natural log-probability of each drawn token, as said above.
        likeliest: for each drawn token the `top_logprobs` likeliest ones, (token, log-probability), likeliest first.
        finish_reason: None while it runs.
        stop_reason: the stop text or stop token that ended it, if one did.
        error: why it cannot go on, if it cannot.
        left: nobody waits for it; set by the one who did, from any thread.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    adjustments: Adjustments | None = None
    stop: StopRule | None = None
    grammar: GrammarState | None = None
    top_logprobs: int = 0
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    likeliest: list[list[tuple[int, float]]] = field(default_factory=list[list[tuple[int, float]]])
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    left: bool = False
    _random: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    @property
    def is_over(self) -> bool:
        """True if nothing more is drawn for it."""
        return self.finish_reason is not None or self.error is not None or self.left

    @property
    def read_ids(self) -> Sequence[int]:
        """Ids that the model reads before it gives the next token: the prompt, then the tokens drawn so far."""
        return [*self.prompt_ids, *self.token_ids] if self.token_ids else self.prompt_ids

    @property
    def is_reshaped(self) -> bool:
        """True if what is drawn depends on more than temperature and `top_p`."""
        return self.adjustments is not None or self.grammar is not None

    def next_uniform(self) -> float:
        """Return the next uniform number in [0, 1)."""
        return self._random.random()

    def append(self, token_id: int, logprob: float, eos_ids: Collection[int], decode: DecodeText) -> None:
        """Take the next token and see whether it is the last."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if token_id in eos_ids:
            self.finish_reason = "stop"
            return
        if self.grammar is not None:
            self.grammar.accept(token_id)
        if self.stop is not None and (hit := self.stop.hit(self.token_ids, decode)):
            self.finish_reason, self.stop_reason = "stop", hit.reason
        elif len(self.token_ids) >= self.max_new_tokens:
            self.finish_reason = "length"
