"""Pairs the records of two recorders of the same calls if they share no id: first by text, then by time.

Text: equal messages. Among calls with equal messages the answers decide. Time: a call lies within the span of its
client. A pair is certain if only one call and one span have its text, or if exactly one span is a candidate: a span
that contains the call and no other call. Otherwise calls and spans are still paired, so that they are counted once, and
each pair lists the candidate spans.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal, NamedTuple

from agentlightning.adapter.calls.intervals import SLACK_SECONDS, Interval, Intervals, narrowed

MatchedBy = Literal["response_id", "traceparent", "request", "time"]

_MOST_MEANT: Final = 32
"""With more candidate spans than this, none is named; the call is still paired with one of them."""
_MOST_LOOKED_AT: Final = 256
"""Maximum number of spans examined around one call; with more concurrent calls, pairs remain uncertain."""


class Told(NamedTuple):
    """The record of a call by one recorder."""

    when: Interval | None = None
    """Time of the call; None if it was not recorded."""
    failed: bool = False
    reply: str | None = None
    """Id of the reply."""
    system: str = ""
    """The leading system messages."""
    lines: int | None = None
    """Hash of the other messages; None if no text was recorded."""
    answer: int | None = None
    """Hash of the answer."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A call and a span, by their indices, that are treated as the same."""

    call: int
    span: int
    how: MatchedBy
    meant: tuple[int, ...] = ()
    """Indices of the candidate spans; empty if `span` is certain."""
    may_be_none: bool = False
    """True if possibly none of them belongs to the call, because there are more calls than spans."""


def pairs(calls: Sequence[Told], spans: Sequence[Told]) -> list[Pair]:
    """Return the pairs; each call and each span is in at most one."""
    if not calls or not spans:
        return []
    pairing = _Pairing(calls, spans)
    for group in pairing.groups():
        pairing.pair_by_words(group)
    pairing.pair_in_time(lambda account: account.when is not None and not account.failed)
    pairing.pair_in_time(lambda account: account.when is not None)
    for group in pairing.groups():
        pairing.pair_in_order(group)
    return pairing.pairs


class _Group(NamedTuple):
    """Calls and spans that may be the same, by their indices."""

    calls: list[int]
    spans: list[int]


class _Pairing:
    def __init__(self, calls: Sequence[Told], spans: Sequence[Told]) -> None:
        self._calls, self._spans = calls, spans
        self._free_calls, self._free_spans = _by_start(calls), _by_start(spans)
        # a recorder without system messages is compared without them
        with_system = all(any(account.system for account in side) for side in (calls, spans))
        self._call_keys, self._span_keys = (_keys(side, with_system) for side in (calls, spans))
        self._other_answers = set[tuple[int, int]]()
        """Pairs with equal text and different answers."""
        self.pairs: list[Pair] = []

    def groups(self) -> list[_Group]:
        """Return the unpaired calls and spans with equal text, if there are both."""
        groups: dict[object, _Group] = defaultdict(lambda: _Group([], []))
        for free, keys, side in ((self._free_calls, self._call_keys, 0), (self._free_spans, self._span_keys, 1)):
            for at in free:
                if keys[at] is not None:
                    groups[keys[at]][side].append(at)
        return [group for group in groups.values() if group.calls and group.spans]

    def _add(self, pair: Pair) -> None:
        self.pairs.append(pair)
        del self._free_calls[pair.call], self._free_spans[pair.span]

    def _may_be(self, call: int, span: int) -> bool:
        """True if neither ids nor text nor answers show that it is another call."""
        ours, theirs = self._call_keys[call], self._span_keys[span]
        if ours is None or theirs is None:
            return self._is_one_reply(call, span)
        return ours == theirs and (call, span) not in self._other_answers

    def _is_one_reply(self, call: int, span: int) -> bool:
        """False if both have a reply's id: those of equal replies are already matched."""
        return self._calls[call].reply is None or self._spans[span].reply is None

    # --- text --------------------------------------------------------------------------------------------------------

    def pair_by_words(self, group: _Group) -> None:
        """Add the certain pairs of a group with equal text. If answers separate calls, other pairs are excluded."""
        if len(group.calls) > 1 or len(group.spans) > 1:
            alone = [each for each in self._by_answer(group) if len(each.calls) == len(each.spans) == 1]
            certain = [(call, span) for (call,), (span,) in alone if self._is_one_reply(call, span)]
            for call, span in certain:
                self._add(Pair(call, span, "request"))
            group = _Group(*([at for at in side if at in free] for side, free in zip(group, self._free(), strict=True)))
            if certain:
                both = ((call, span) for call in group.calls for span in group.spans)
                for call, span in islice(both, _MOST_LOOKED_AT**2):
                    answers = (self._calls[call].answer, self._spans[span].answer)
                    if None not in answers and answers[0] != answers[1]:
                        self._other_answers.add((call, span))
        if len(group.calls) == len(group.spans) == 1 and self._may_be(group.calls[0], group.spans[0]):
            (call,), (span,) = group
            inner, outer = self._calls[call].when, self._spans[span].when
            # a reply with another id is another call, unless the time shows that it is this one
            if self._is_one_reply(call, span) or (inner is not None and outer is not None and outer.holds(inner)):
                self._add(Pair(call, span, "request"))

    def _by_answer(self, group: _Group) -> Iterable[_Group]:
        """Return the calls and spans of each answer; none if one of them may have any answer."""
        answers: dict[int, _Group] = defaultdict(lambda: _Group([], []))
        for places, accounts, side in ((group.calls, self._calls, 0), (group.spans, self._spans, 1)):
            for at in places:
                answer = accounts[at].answer
                if answer is not None:
                    answers[answer][side].append(at)
                elif not accounts[at].failed:
                    return ()
        return answers.values()

    def pair_in_order(self, group: _Group) -> None:
        """Pair calls and spans with equal text that do not match in time, in the order of time; none is certain."""
        nameless = [at for at in group.spans if self._spans[at].reply is None]
        candidates, may_be_none = tuple(nameless[: _MOST_MEANT + 1]), len(group.calls) > len(nameless)
        for call, span in zip(group.calls, nameless, strict=False):
            if self._may_be(call, span):
                self._add(Pair(call, span, "request", candidates, may_be_none))

    def _free(self) -> tuple[dict[int, None], dict[int, None]]:
        return self._free_calls, self._free_spans

    # --- time --------------------------------------------------------------------------------------------------------

    def pair_in_time(self, counts: Callable[[Told], bool]) -> None:
        """Pair as many of the unpaired calls selected by `counts` as possible, each with a span around it."""
        own = {at: when for at in self._free_calls if counts(account := self._calls[at]) and (when := account.when)}
        when = {at: outer for at in self._free_spans if counts(account := self._spans[at]) and (outer := account.when)}
        if not own or not when:
            return
        places, tree = list(when), Intervals(list(when.values()))
        candidates: dict[int, list[int]] = {}
        for call, inner in own.items():
            around = (places[at] for at in islice(tree.around(inner), _MOST_LOOKED_AT))
            if possible := list(islice((span for span in around if self._may_be(call, span)), _MOST_MEANT + 1)):
                candidates[call] = narrowed(inner, possible, when)
        assignment = self._taken(own, candidates, when)
        wanted_by: dict[int, list[int]] = defaultdict(list)
        for call, spans in candidates.items():
            for span in spans:
                wanted_by[span].append(call)
        short = _short_of_spans(candidates, assignment, wanted_by)
        crowded = any(len(spans) > _MOST_MEANT for spans in candidates.values())
        for call, span in assignment.items():
            no_words = self._call_keys[call] is None or self._span_keys[span] is None
            how: MatchedBy = "time" if no_words else "request"
            if candidates[call] == [span] and wanted_by[span] == [call] and not crowded:
                self._add(Pair(call, span, how))
            else:
                may_be_none = call in short or len(candidates[call]) > _MOST_MEANT
                self._add(Pair(call, span, how, tuple(candidates[call]), may_be_none))

    def _taken(
        self, own: Mapping[int, Interval], candidates: Mapping[int, list[int]], when: Mapping[int, Interval]
    ) -> dict[int, int]:
        """Return the span for each call.

        In order of start, each call gets the span around it that ends first: no other choice gives more calls a
        span.
        """
        free: list[tuple[float, int]] = []
        by_start = sorted(((when[at].start - SLACK_SECONDS, at) for at in when), reverse=True)
        assignment: dict[int, int] = {}
        for call in sorted(candidates, key=lambda at: own[at].start):
            while by_start and by_start[-1][0] <= own[call].start:
                at = by_start.pop()[1]
                insort(free, (when[at].end + SLACK_SECONDS, at))
            first = bisect_left(free, (own[call].end, -1))
            for place in range(first, min(first + _MOST_LOOKED_AT, len(free))):
                span = free[place][1]
                if (len(candidates[call]) > 1 or candidates[call] == [span]) and self._may_be(call, span):
                    assignment[call] = span
                    del free[place]
                    break
        return assignment


def _keys(accounts: Sequence[Told], with_system: bool) -> list[tuple[int, str] | None]:
    """Return the text of each account in a form in which equal ones are equal."""
    return [None if each.lines is None else (each.lines, each.system if with_system else "") for each in accounts]


def _by_start(accounts: Sequence[Told]) -> dict[int, None]:
    """Return the indices in the order of the start times, those without a time last."""
    starts = [math.inf if each.when is None else each.when.start for each in accounts]
    return dict.fromkeys(sorted(range(len(accounts)), key=lambda at: (starts[at], at)))


def _short_of_spans(
    candidates: Mapping[int, list[int]], assignment: Mapping[int, int], wanted_by: Mapping[int, list[int]]
) -> set[int]:
    """Return the calls that compete, directly or not, with a call for which no span remained."""
    waiting = [call for call in candidates if call not in assignment]
    short, spans = set(waiting), set[int]()
    while waiting:
        for span in candidates[waiting.pop()]:
            if span not in spans:
                spans.add(span)
                rivals = [call for call in wanted_by[span] if call not in short]
                short.update(rivals)
                waiting.extend(rivals)
    return short
