"""Finds the earlier call of an attempt whose conversation a prompt was made from, by comparing messages.

Every conversation is known by the hashes of its beginnings, each made from the one before and one more line, so that
the work is linear in the messages of all calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from agentlightning.adapter.calls.calls import ModelCall
from agentlightning.adapter.calls.conversation import Conversation, Line, conversation_of

_CANDIDATES = 8
"""Of several calls that gave the same answer, so many of the latest are looked at."""


@dataclass(frozen=True, slots=True)
class Predecessor:
    """An earlier call, and how many lines of its conversation, answer included, a prompt begins with."""

    call: ModelCall
    conversation: Conversation
    common: int
    by_answer: bool = False
    """The prompt holds its answer, or one from further back in its conversation."""

    @property
    def is_continued(self) -> bool:
        """The prompt begins with the whole conversation."""
        return self.common == len(self.conversation.whole)


class History:
    """The calls so far. Calls whose messages were not kept are not among them."""

    def __init__(self) -> None:
        self._calls: list[tuple[ModelCall, Conversation]] = []
        self._prompts: dict[int, int] = {}
        self._wholes: dict[int, int] = {}
        self._beginnings: dict[int, int] = {}
        self._answers: dict[Line, list[int]] = {}
        self._lines: dict[Line, int] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: ModelCall, conversation: Conversation | None) -> None:
        if conversation is None or not (whole := conversation.whole):
            return
        number = len(self._calls)
        self._calls.append((call, conversation))
        for seed in _seeds(conversation):
            beginnings = list(_chain(seed, whole))
            self._beginnings.update(dict.fromkeys(beginnings, number))
            self._wholes[beginnings[-1]] = number
            if conversation.lines:
                self._prompts[beginnings[len(conversation.lines) - 1]] = number
        self._lines.update(dict.fromkeys(whole, number))
        if conversation.answer is not None:
            self._answers.setdefault(conversation.answer, []).append(number)

    def predecessor(self, conversation: Conversation) -> Predecessor | None:
        """Return the call from whose conversation a prompt was made; None if it shares nothing with any.

        That is one that asked the same, else the call that gave the last answer in the prompt; without one the call
        with the longest common beginning, or with any line in common.
        """
        same_request = (
            self._prompts.get(_end(_seeds(conversation)[0], conversation.lines)) if conversation.lines else None
        )
        if same_request is not None:
            return self._found(same_request, conversation)
        answered = (at for at in reversed(range(len(conversation.lines))) if conversation.lines[at] in self._answers)
        last = next(answered, None)
        if last is None:
            number = next((self._lines[line] for line in reversed(conversation.lines) if line in self._lines), None)
            return self.longest(conversation) or (None if number is None else self._found(number, conversation))
        for seed in _seeds(conversation):
            number = self._wholes.get(_end(seed, conversation.lines[: last + 1]))
            if number is not None:
                return replace(self._found(number, conversation), by_answer=True)
        candidates = self._answers[conversation.lines[last]][-_CANDIDATES:]
        lines = frozenset(conversation.lines)
        found = max(
            (self._found(number, conversation) for number in reversed(candidates)),
            key=lambda one: (one.common, len(lines.intersection(one.conversation.whole))),
        )
        return replace(found, by_answer=True)

    def longest(self, conversation: Conversation) -> Predecessor | None:
        """Return the latest call with the longest common beginning of at least one line."""
        best: Predecessor | None = None
        for seed in _seeds(conversation):
            number = None
            for beginning in _chain(seed, conversation.lines):
                if beginning not in self._beginnings:
                    break
                number = self._beginnings[beginning]
            found = None if number is None else self._found(number, conversation)
            if found is not None and (best is None or found.common > best.common):
                best = found
        return best

    def _found(self, number: int, conversation: Conversation) -> Predecessor:
        call, before = self._calls[number]
        pairs = zip(before.whole, conversation.lines, strict=False)
        common = next((at for at, (old, new) in enumerate(pairs) if old != new), None)
        return Predecessor(call, before, min(len(before.whole), len(conversation.lines)) if common is None else common)


def conversation_of_call(call: ModelCall) -> Conversation | None:
    """Return the conversation of a call; None where nobody kept its messages."""
    spans = call.spans
    return None if spans is None else conversation_of(spans.request, spans.seen, spans.record)


def _seeds(conversation: Conversation) -> tuple[int, int]:
    """Conversations with the same instructions are looked for first."""
    return hash((conversation.system, conversation.tools)), 0


def _chain(seed: int, lines: Sequence[Line]) -> Iterator[int]:
    for line in lines:
        seed = hash((seed, line))
        yield seed


def _end(seed: int, lines: Sequence[Line]) -> int:
    return list(_chain(seed, lines))[-1]
