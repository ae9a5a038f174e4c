"""The conversations of one attempt in words, so that a prompt finds the call whose conversation it was made from.

Every conversation is known by the hashes of its beginnings, each made from the one before and one more line, so that
the work is linear in the words of all calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from agentlightning.adapter.calls import ModelCall
from agentlightning.adapter.talk import Line, Talk, talk_of

_CANDIDATES = 8
"""Of several calls that gave the same answer, so many of the latest are looked at."""


@dataclass(frozen=True, slots=True)
class Predecessor:
    """An earlier call, and how many lines of its conversation, answer included, a prompt begins with."""

    call: ModelCall
    talk: Talk
    common: int
    by_answer: bool = False
    """The prompt holds its answer, or one from further back in its conversation."""

    @property
    def is_continued(self) -> bool:
        """The prompt begins with the whole conversation."""
        return self.common == len(self.talk.whole)


class History:
    """The calls so far. Calls without words are not among them."""

    def __init__(self) -> None:
        self._calls: list[tuple[ModelCall, Talk]] = []
        self._prompts: dict[int, int] = {}
        self._wholes: dict[int, int] = {}
        self._beginnings: dict[int, int] = {}
        self._answers: dict[Line, list[int]] = {}
        self._lines: dict[Line, int] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: ModelCall) -> None:
        talk = words_of(call)
        if talk is None or not talk.whole:
            return
        number = len(self._calls)
        self._calls.append((call, talk))
        whole = talk.whole
        for seed in _seeds(talk):
            beginnings = list(_chain(seed, whole))
            self._beginnings.update(dict.fromkeys(beginnings, number))
            self._wholes[beginnings[-1]] = number
            if talk.lines:
                self._prompts[beginnings[len(talk.lines) - 1]] = number
        self._lines.update(dict.fromkeys(whole, number))
        if talk.answer is not None:
            self._answers.setdefault(talk.answer, []).append(number)

    def predecessor(self, talk: Talk) -> Predecessor | None:
        """Return the call from whose conversation a prompt was made; None if it shares nothing with any.

        That is one that asked the same, else the call that gave the last answer in the prompt; without one the call
        with the longest common beginning, or with any line in common.
        """
        asked = self._prompts.get(_end(_seeds(talk)[0], talk.lines)) if talk.lines else None
        if asked is not None:
            return self._found(asked, talk)
        said = (at for at in reversed(range(len(talk.lines))) if talk.lines[at] in self._answers)
        last = next(said, None)
        if last is None:
            return self.longest(talk) or self._with_any_line(talk)
        for seed in _seeds(talk):
            number = self._wholes.get(_end(seed, talk.lines[: last + 1]))
            if number is not None:
                return replace(self._found(number, talk), by_answer=True)
        candidates = self._answers[talk.lines[last]][-_CANDIDATES:]
        lines = frozenset(talk.lines)
        found = max(
            (self._found(number, talk) for number in reversed(candidates)),
            key=lambda one: (one.common, len(lines.intersection(one.talk.whole))),
        )
        return replace(found, by_answer=True)

    def longest(self, talk: Talk) -> Predecessor | None:
        """Return the latest call with the longest common beginning of at least one line."""
        best: Predecessor | None = None
        for seed in _seeds(talk):
            number = None
            for beginning in _chain(seed, talk.lines):
                if beginning not in self._beginnings:
                    break
                number = self._beginnings[beginning]
            found = None if number is None else self._found(number, talk)
            if found is not None and (best is None or found.common > best.common):
                best = found
        return best

    def _with_any_line(self, talk: Talk) -> Predecessor | None:
        number = next((self._lines[line] for line in reversed(talk.lines) if line in self._lines), None)
        return None if number is None else self._found(number, talk)

    def _found(self, number: int, talk: Talk) -> Predecessor:
        call, before = self._calls[number]
        pairs = zip(before.whole, talk.lines, strict=False)
        common = next((at for at, (old, new) in enumerate(pairs) if old != new), None)
        return Predecessor(call, before, min(len(before.whole), len(talk.lines)) if common is None else common)


def words_of(call: ModelCall) -> Talk | None:
    """Return what was said in a call; None where nobody kept it."""
    witness = call.witness
    return None if witness is None else talk_of(witness.request, witness.seen, witness.record)


def _seeds(talk: Talk) -> tuple[int, int]:
    """Conversations with the same instructions are looked for first."""
    return hash((talk.system, talk.tools)), 0


def _chain(seed: int, lines: Sequence[Line]) -> Iterator[int]:
    for line in lines:
        seed = hash((seed, line))
        yield seed


def _end(seed: int, lines: Sequence[Line]) -> int:
    return list(_chain(seed, lines))[-1]
