"""Pairs what two recorders tell of the same calls where no id does: by the words, and only then by the time.

Words: equal messages. Of several calls with equal messages the answers tell which is which. Time: a call lies within
the span of its client. A pair is certain where the words leave one of each, or where exactly one span can be meant: one
that has the call within it, with no other call within it. Otherwise calls and spans are still paired, so that they are
counted once, and each pair lists the spans that can be meant.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal, NamedTuple

from agentlightning.adapter.calls.intervals import SLACK_SECONDS, Interval, Intervals, narrowed

MatchedBy = Literal["response_id", "traceparent", "request", "time"]

_MOST_MEANT: Final = 32
"""Of more spans that can be meant than these nothing is told; the call is paired with one of them all the same."""
_MOST_LOOKED_AT: Final = 256
"""Around one call; beyond them lie the rivals of very many calls at once, of which nothing is certain."""


class Told(NamedTuple):
    """What one recorder tells of a call."""

    when: Interval | None = None
    """None if it was not kept."""
    failed: bool = False
    reply: str | None = None
    """The id of the reply."""
    system: str = ""
    """The leading system messages."""
    lines: int | None = None
    """A hash of the other messages; None if no words were kept."""
    answer: int | None = None
    """A hash of the answer; None if it was not kept."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A call and the span that is counted as the same call, by their places in the lists that were given."""

    call: int
    span: int
    how: MatchedBy
    meant: tuple[int, ...] = ()
    """The spans any of which may be the one, where it is not certain."""
    may_be_none: bool = False
    """The call may also be one that no span tells of: there are more calls than spans."""


class _Group(NamedTuple):
    """Calls and spans that may be the same, by their places."""

    calls: list[int]
    spans: list[int]


class _Sides(NamedTuple):
    calls: Sequence[Told]
    spans: Sequence[Told]

    def one_call(self, call: int, span: int) -> bool:
        """False if both name a reply and it is another one."""
        return self.calls[call].reply is None or self.spans[span].reply is None

    def equal_words(self, call: int, span: int) -> bool:
        ours, theirs = self.calls[call], self.spans[span]
        return ours.lines == theirs.lines and (ours.system == theirs.system or not (ours.system and theirs.system))

    def may_be(self, call: int, span: int) -> bool:
        """True if neither ids nor words say that it is another call."""
        no_words = self.calls[call].lines is None or self.spans[span].lines is None
        return (no_words and self.one_call(call, span)) or (not no_words and self.equal_words(call, span))

    def within(self, call: int, span: int) -> bool:
        inner, outer = self.calls[call].when, self.spans[span].when
        return inner is not None and outer is not None and outer.holds(inner)


def pairs(calls: Sequence[Told], spans: Sequence[Told]) -> list[Pair]:
    """Return the pairs; each call and each span is in at most one."""
    if not calls or not spans:
        return []
    sides, found = _Sides(calls, spans), list[Pair]()
    free = _Group(sorted(range(len(calls)), key=_order(calls)), sorted(range(len(spans)), key=_order(spans)))
    other_answers: set[tuple[int, int]] = set()
    for key in _SPELLINGS:
        for group in _of_equal_words(sides, _left(free, found), key):
            found += _certain_by_words(sides, group, other_answers)

    def may_be(call: int, span: int) -> bool:
        return sides.may_be(call, span) and (call, span) not in other_answers

    found += _in_time(sides, _left(free, found), may_be)
    for key in _SPELLINGS:
        for group in _of_equal_words(sides, _left(free, found), key):
            found += _in_order(sides, group, may_be)
    return found


def _order(told: Sequence[Told]) -> Callable[[int], tuple[float, int]]:
    return lambda at: (math.inf if (when := told[at].when) is None else when.start, at)


def _left(group: _Group, found: Iterable[Pair]) -> _Group:
    calls, spans = {pair.call for pair in found}, {pair.span for pair in found}
    return _Group([at for at in group.calls if at not in calls], [at for at in group.spans if at not in spans])


# --- words -----------------------------------------------------------------------------------------------------------


def _whole(told: Told, is_span: bool) -> object:
    return None if told.lines is None else (told.system, told.lines)


def _lines_without_system(told: Told, is_span: bool) -> object:
    """For spans that leave the system message out."""
    return None if is_span and told.system else told.lines


def _lines_of_call_without_system(told: Told, is_span: bool) -> object:
    return None if not is_span and told.system else told.lines


_SPELLINGS: Final = (_whole, _lines_without_system, _lines_of_call_without_system)


def _of_equal_words(sides: _Sides, free: _Group, key: Callable[[Told, bool], object]) -> list[_Group]:
    groups: dict[object, _Group] = {}
    for at in free.spans:
        if (words := key(sides.spans[at], True)) is not None:
            groups.setdefault(words, _Group([], [])).spans.append(at)
    for at in free.calls if groups else ():
        if (group := groups.get(key(sides.calls[at], False))) is not None:
            group.calls.append(at)
    return [group for group in groups.values() if group.calls]


def _certain_by_words(sides: _Sides, group: _Group, other_answers: set[tuple[int, int]]) -> list[Pair]:
    """Return the certain pairs of a group of equal words. Where answers tell calls apart, the others are noted."""
    found: list[Pair] = []
    if len(group.calls) > 1 or len(group.spans) > 1:
        found = _by_answer(sides, group)
        group = _left(group, found)
    if found:
        told = ((call, span) for call in group.calls for span in group.spans)
        other_answers.update(pair for pair in islice(told, _MOST_LOOKED_AT**2) if _other_answer(sides, *pair))
    if len(group.calls) == len(group.spans) == 1 and (group.calls[0], group.spans[0]) not in other_answers:
        (call,), (span,) = group
        # a reply by another name is another call, unless the time says that it is this one
        if sides.one_call(call, span) or sides.within(call, span):
            found.append(Pair(call, span, "request"))
    return found


def _other_answer(sides: _Sides, call: int, span: int) -> bool:
    answers = (sides.calls[call].answer, sides.spans[span].answer)
    return None not in answers and answers[0] != answers[1]


def _in_order(sides: _Sides, group: _Group, may_be: Callable[[int, int], bool]) -> list[Pair]:
    """Pair what has equal words and is nowhere near in time, in the order of the times; none of it is certain."""
    nameless = [at for at in group.spans if sides.spans[at].reply is None]
    meant, may_be_none = tuple(nameless[: _MOST_MEANT + 1]), len(group.calls) > len(nameless)
    both = zip(group.calls, nameless, strict=False)
    return [Pair(call, span, "request", meant, may_be_none) for call, span in both if may_be(call, span)]


def _by_answer(sides: _Sides, group: _Group) -> list[Pair]:
    """Return the pairs of which no other call and no other span of the group can have the same answer."""
    answers: dict[int, _Group] = {}
    for told, by_side in ((sides.calls, 0), (sides.spans, 1)):
        for at in group[by_side]:
            answer = told[at].answer
            if answer is not None:
                answers.setdefault(answer, _Group([], []))[by_side].append(at)
            elif not told[at].failed:
                return []  # it may be any of them
    alone = (each for each in answers.values() if len(each.calls) == len(each.spans) == 1)
    found = ((each.calls[0], each.spans[0]) for each in alone)
    return [Pair(call, span, "request") for call, span in found if sides.one_call(call, span)]


# --- time ------------------------------------------------------------------------------------------------------------


def _in_time(sides: _Sides, group: _Group, may_be: Callable[[int, int], bool]) -> list[Pair]:
    """Pair calls with spans around them: those that were answered first, then what is left with what is left."""
    timed = _Group(
        [at for at in group.calls if sides.calls[at].when is not None],
        [at for at in group.spans if sides.spans[at].when is not None],
    )
    well = _Group(
        [at for at in timed.calls if not sides.calls[at].failed],
        [at for at in timed.spans if not sides.spans[at].failed],
    )
    found = _within(sides, well, may_be)
    if len(well.calls) == len(timed.calls) and len(well.spans) == len(timed.spans):
        return found
    return found + _within(sides, _left(timed, found), may_be)


def _within(sides: _Sides, group: _Group, may_be: Callable[[int, int], bool]) -> list[Pair]:
    """Pair as many calls as possible, each with a span around it."""
    if not group.calls or not group.spans:
        return []
    when = {at: outer for at in group.spans if (outer := sides.spans[at].when) is not None}
    tree = Intervals([when[at] for at in group.spans])
    own = {at: inner for at in group.calls if (inner := sides.calls[at].when) is not None}
    meant: dict[int, list[int]] = {}
    for call, inner in own.items():
        around = (group.spans[at] for at in islice(tree.around(inner), _MOST_LOOKED_AT))
        possible = list(islice((span for span in around if may_be(call, span)), _MOST_MEANT + 1))
        if possible:
            meant[call] = narrowed(inner, possible, when)
    taken = _taken(own, meant, when, may_be)
    wanted_by: dict[int, list[int]] = {}
    for call, spans in meant.items():
        for span in spans:
            wanted_by.setdefault(span, []).append(call)
    short = _short_of_spans(meant, taken, wanted_by)
    crowded = any(len(spans) > _MOST_MEANT for spans in meant.values())
    found: list[Pair] = []
    for call, span in taken.items():
        how: MatchedBy = "time" if sides.calls[call].lines is None or sides.spans[span].lines is None else "request"
        if meant[call] == [span] and wanted_by[span] == [call] and not crowded:
            found.append(Pair(call, span, how))
        else:
            found.append(Pair(call, span, how, tuple(meant[call]), call in short or len(meant[call]) > _MOST_MEANT))
    return found


def _taken(
    own: dict[int, Interval],
    meant: dict[int, list[int]],
    when: Mapping[int, Interval],
    may_be: Callable[[int, int], bool],
) -> dict[int, int]:
    """Return the span that each call takes.

    By start, each call takes of the spans around it the one that ends first: no other choice gives more calls a span.
    """
    free: list[tuple[float, int]] = []
    coming = sorted(((when[at].start - SLACK_SECONDS, at) for at in when), reverse=True)
    taken: dict[int, int] = {}
    for call in sorted(meant, key=lambda at: own[at].start):
        while coming and coming[-1][0] <= own[call].start:
            at = coming.pop()[1]
            insort(free, (when[at].end + SLACK_SECONDS, at))
        first = bisect_left(free, (own[call].end, -1))
        only = meant[call][0] if len(meant[call]) == 1 else None
        for place in range(first, min(first + _MOST_LOOKED_AT, len(free))):
            span = free[place][1]
            if (only is None or span == only) and may_be(call, span):
                taken[call] = span
                del free[place]
                break
    return taken


def _short_of_spans(meant: dict[int, list[int]], taken: dict[int, int], wanted_by: dict[int, list[int]]) -> set[int]:
    """Return the calls that compete, directly or not, with a call for which no span was left."""
    waiting = [call for call in meant if call not in taken]
    short, seen = set(waiting), set[int]()
    while waiting:
        for span in meant[waiting.pop()]:
            if span not in seen:
                seen.add(span)
                rivals = [call for call in wanted_by[span] if call not in short]
                short.update(rivals)
                waiting.extend(rivals)
    return short
