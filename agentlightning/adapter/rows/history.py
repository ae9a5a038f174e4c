"""Finds the earlier call of an attempt whose conversation a prompt continues, by comparing messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agentlightning.adapter.calls.calls import ModelCall
from agentlightning.adapter.calls.conversation import Conversation, Line, conversation_of

_LATEST = 64
"""Maximum number of latest calls that are examined; for calls with the last answer of a prompt, eight."""
_OF_ONE_ANSWER = 8


@dataclass(frozen=True, slots=True)
class Predecessor:
    """An earlier call, and the number of lines of its conversation, including the answer, that a prompt begins with."""

    call: ModelCall
    conversation: Conversation
    common: int
    by_answer: bool = False
    """True if the prompt contains its answer, or an earlier answer of its conversation."""

    @property
    def is_continued(self) -> bool:
        """True if the prompt begins with the full conversation."""
        return self.common == len(self.conversation.whole)


class History:
    """The calls so far, excluding those whose messages were not recorded."""

    def __init__(self) -> None:
        self._calls: list[tuple[ModelCall, Conversation]] = []
        self._prompts: dict[object, int] = {}
        self._answers: dict[Line, list[int]] = {}
        self._lines: dict[Line, int] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: ModelCall, conversation: Conversation | None) -> None:
        if conversation is None or not conversation.whole:
            return
        number = len(self._calls)
        self._calls.append((call, conversation))
        self._lines.update(dict.fromkeys(conversation.whole, number))
        if conversation.lines:
            self._prompts[_asked(conversation)] = number
        if conversation.answer is not None:
            self._answers.setdefault(conversation.answer, []).append(number)

    def predecessor(self, conversation: Conversation) -> Predecessor | None:
        """Return the call whose conversation a prompt continues; None if it shares no line with any call.

        That is a call with the same prompt; otherwise the call with the last answer in the prompt; otherwise the call
        with the longest common beginning, or with any line in common.
        """
        if (number := self._prompts.get(_asked(conversation))) is not None:
            return self._compared(number, conversation)
        lines = conversation.lines
        last = next((at for at in reversed(range(len(lines))) if lines[at] in self._answers), None)
        if last is not None:
            return self._best(self._answers[lines[last]][-_OF_ONE_ANSWER:], conversation, answered=last + 1)
        if (longest := self.longest(conversation)) is not None:
            return longest
        number = next((self._lines[line] for line in reversed(conversation.lines) if line in self._lines), None)
        return None if number is None else self._compared(number, conversation)

    def longest(self, conversation: Conversation) -> Predecessor | None:
        """Return the latest call with the longest common beginning of at least one line."""
        numbers = range(max(0, len(self._calls) - _LATEST), len(self._calls))
        best = self._best(numbers, conversation) if numbers else None
        return best if best is not None and best.common else None

    def _best(self, numbers: Iterable[int], conversation: Conversation, *, answered: int = 0) -> Predecessor:
        """Return the call with exactly the first `answered` lines, else the one with the longest common beginning; the
        latest of several."""
        lines = frozenset(conversation.lines if answered else ())

        def likeness(one: Predecessor) -> tuple[bool, int, bool, int]:
            before = one.conversation
            alike = (before.system, before.tools) == (conversation.system, conversation.tools)
            is_whole = one.is_continued and one.common == answered
            return is_whole, one.common, alike, len(lines.intersection(before.whole))

        compared = [self._compared(number, conversation, answered > 0) for number in numbers]
        return max(reversed(compared), key=likeness)

    def _compared(self, number: int, conversation: Conversation, by_answer: bool = False) -> Predecessor:
        call, before = self._calls[number]
        pairs = zip(before.whole, conversation.lines, strict=False)
        common = next((at for at, (old, new) in enumerate(pairs) if old != new), None)
        most = min(len(before.whole), len(conversation.lines))
        return Predecessor(call, before, most if common is None else common, by_answer)


def _asked(conversation: Conversation) -> object:
    return conversation.system, conversation.tools, conversation.lines


def conversation_of_call(call: ModelCall) -> Conversation | None:
    """Return the conversation of a call; None if its messages were not recorded."""
    spans = call.spans
    return None if spans is None else conversation_of(spans.request, spans.seen, spans.record)
