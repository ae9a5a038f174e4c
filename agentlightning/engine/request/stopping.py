"""Ends a completion at a stop text or a stop token.

The tokens of the row, and their log-probabilities, are exactly those that were sampled: a stop text that ends in the
middle of a token has this whole token in the row, and what the token says beyond the stop text is in no reply, as in
vLLM. So the next prompt of the conversation does not begin with the row's tokens where the agent sends back the cut
text, and a new row begins there (a seam, which the ledger counts). A stop text is found wherever its end falls, also
across tokens, and only once `min_tokens` are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

DecodeText = Callable[[Sequence[int]], str]
"""Returns the text of tokens, special ones included."""

_UNFINISHED: Final = "\ufffd"
"""What decoding shows for the bytes of a character that is not complete."""


class Hit(NamedTuple):
    """Where the text of a reply ends.

    Attributes:
        end: characters of the decoded text that belong to the reply.
        reason: the stop text or token; None for the end of a single tool call.
    """

    end: int
    reason: str | int | None


@dataclass(frozen=True, slots=True)
class StopRule:
    """What ends one completion.

    Attributes:
        texts: none of them empty.
        token_ids: tokens that end it.
        included: the stop text is part of the reply (`include_stop_str_in_output`).
        min_tokens: nothing is looked for before.
        last_call: the text that ends a tool call, where only one call may be made; it is part of the reply.
    """

    texts: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    included: bool = False
    min_tokens: int = 0
    last_call: str | None = None

    def hit(self, token_ids: Sequence[int], decode: DecodeText) -> Hit | None:
        """Return where the reply ends if the last of the tokens ends it; `end` counts from an unsaid place."""
        if len(token_ids) < self.min_tokens:
            return None
        longest = max(map(len, self._sought), default=0)
        # a character takes four tokens at most; the first tokens of the window may be cut and are longer than needed
        window = token_ids[-(4 * longest + 8) :] if longest else token_ids[-1:]
        return self._search(window, decode)

    def cut(self, token_ids: Sequence[int], decode: DecodeText) -> str:
        """Return the text of a reply that this rule ended."""
        hit = self._search(token_ids, decode)
        text = decode(token_ids)
        return text if hit is None else text[: hit.end]

    @property
    def _sought(self) -> tuple[str, ...]:
        return self.texts if self.last_call is None else (*self.texts, self.last_call)

    def _search(self, token_ids: Sequence[int], decode: DecodeText) -> Hit | None:
        sought_texts, earlier = self._sought, token_ids[:-1]
        if token_ids[-1] in self.token_ids:
            kept = token_ids if self.included else earlier
            return Hit(len(decode(kept)) if kept else 0, token_ids[-1])
        text = decode(token_ids) if sought_texts else ""
        if not any(sought in text for sought in sought_texts):
            return None  # as after nearly every token: decoded once
        known = len(decode(earlier).rstrip(_UNFINISHED)) if earlier else 0
        places = [(text.find(sought, max(0, known - len(sought) + 1)), sought) for sought in sought_texts]
        found = [(at, sought) for at, sought in places if at >= 0]
        if not found:
            return None
        at, sought = min(found, key=lambda pair: (pair[0] + len(pair[1]), pair[0]))  # the one that is complete first
        if sought == self.last_call and sought not in self.texts:
            return Hit(at + len(sought), None)
        return Hit(at + len(sought) if self.included else at, sought)
