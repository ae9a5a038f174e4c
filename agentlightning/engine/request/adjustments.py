"""What changes the distribution from which tokens are drawn, beside temperature and `top_p`.

In the order in which vLLM applies them: the grammar's mask, `min_tokens` and `logit_bias`; the penalties; the
temperature; `min_p`, `top_k`, `top_p`. What is recorded of a drawn token contains none of it: see `Completion`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustments:
    """Settings of one request; the defaults change nothing.

    Attributes:
        top_k: only so many of the likeliest tokens; 0 for all.
        min_p: only tokens with at least this share of the likeliest one's probability.
        frequency_penalty: taken off a token's logit for each time it was drawn (OpenAI).
        presence_penalty: taken off a token's logit if it was drawn (OpenAI).
        repetition_penalty: a positive logit of a token in prompt or reply is divided by it, a negative one multiplied
            (CTRL, arXiv:1909.05858, section 4.1).
        logit_bias: added to the logits of these tokens.
        min_tokens: nothing ends the reply before so many tokens are drawn.
        ends: tokens that would end it, held back for `min_tokens`.
    """

    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    min_tokens: int = 0
    ends: frozenset[int] = frozenset()

    def reshape(self, logits: Tensor, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Change the logits of the token after `prompt_ids` and the `token_ids` drawn so far, in place.

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
            seen = logits[tokens]
            logits[tokens] = torch.where(seen > 0, seen / self.repetition_penalty, seen * self.repetition_penalty)
        if token_ids and (self.frequency_penalty or self.presence_penalty):
            counts = Counter(token_ids)
            tokens = torch.tensor(list(counts), device=logits.device)
            times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
            logits[tokens] -= self.frequency_penalty * times + self.presence_penalty

    def truncate(self, likely: Tensor) -> None:
        """Set the probability of what `min_p` and `top_k` leave out to 0, in place, and that of the rest to sum to one.

        Shapes: likely: (V,).
        """
        if self.min_p:
            likely[likely < self.min_p * likely.max()] = 0.0
        if 0 < self.top_k < len(likely):
            likely[likely < likely.topk(self.top_k).values[-1]] = 0.0
        likely /= likely.sum()
