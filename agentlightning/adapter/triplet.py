"""Adapters from the spans of one attempt to triplets: from the tree of all spans, or from the gateway's alone."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Final

from opentelemetry.sdk.trace import ReadableSpan

from agentlightning.adapter.base import garbage_collection_paused
from agentlightning.adapter.calls.calls import (
    ANY_AGENT,
    CallSelection,
    ModelCall,
    calls_by_name,
    checked_policy,
    is_of_other_policy,
)
from agentlightning.adapter.calls.helpers import Ignore, without_helpers
from agentlightning.adapter.spans.attributes import Problem
from agentlightning.adapter.spans.rewards import reward_value
from agentlightning.adapter.spans.tokens import (
    CallReading,
    call_name,
    has_failed,
    is_stale,
    read_call,
)
from agentlightning.adapter.tree.reward_matching import RewardMatchPolicy
from agentlightning.adapter.tree.selection import LLM_CALL_MATCH, SelectedCall, SelectionRules
from agentlightning.adapter.tree.tree import TraceTree, known_metadata, put_reward
from agentlightning.adapter.triplet_base import (
    TraceToTripletBase,
    Transition,
    TripletReading,
    checked_ignore,
    log_problems,
)
from agentlightning.semconv import RAW_SPAN, REQUEST_SPAN
from agentlightning.types import Span, Triplet

__all__ = [
    "LlmProxyTraceToTriplet",
    "RewardMatchPolicy",
    "TraceToTripletBase",
    "TraceTree",
    "TracerTraceToTriplet",
    "Transition",
    "TripletReading",
]

logger = logging.getLogger(__name__)

_GATEWAY_SPANS: Final = frozenset((RAW_SPAN, REQUEST_SPAN))


class TracerTraceToTriplet(TraceToTripletBase):
    """Triplets out of the tree of all spans of an attempt; the default adapter.

    It reads the spans of tracers and the records of the gateway, and makes one triplet of the two spans of one call.
    The rules and what differs from the described system: `tree.py`, `repair.py`, `selection.py`, `reward_matching.py`.

    Args:
        repair_hierarchy: Put spans without their parent where their times say they belong.
        llm_call_match: Regular expression for the names of the tracer's spans that are model calls.
        agent_match: Regular expression for names of agents and roles; only their calls count. A call that may be of
            several agents counts if all of them match; else it is refused as `unknown_agent`. None is every call.
        exclude_llm_call_in_reward: Leave out calls made to compute a reward.
        reward_match: How rewards without a link find their call.
        policy: Only calls of this policy of the gateway. None is every call, but for those of policies that are frozen
            or external.
        ignore: Leave out helper calls (titles, summaries): a regular expression that is searched in the prompt's text,
            or a function of the `ModelCall`. Those of known programs are left out without it.
        _skip_empty_token_spans: Leave out calls without token ids before rewards are matched.

    Raises:
        ValueError: one of the expressions is not valid, there is no such `reward_match`, or `policy` is no name.
    """

    def __init__(
        self,
        repair_hierarchy: bool = True,
        llm_call_match: str = LLM_CALL_MATCH,
        agent_match: str | None = None,
        exclude_llm_call_in_reward: bool = True,
        reward_match: RewardMatchPolicy | str = RewardMatchPolicy.FIRST_OCCURRENCE,
        _skip_empty_token_spans: bool = False,
        *,
        policy: str | None = None,
        ignore: Ignore | None = None,
    ) -> None:
        self.repair_hierarchy = repair_hierarchy
        self.llm_call_match = _expression("llm_call_match", llm_call_match)
        self.agent_match = None if agent_match is None else _expression("agent_match", agent_match)
        self.exclude_llm_call_in_reward = exclude_llm_call_in_reward
        self.reward_match = RewardMatchPolicy(reward_match)
        self.policy = checked_policy(policy)
        self.ignore = checked_ignore(ignore)
        self._skip_empty_token_spans = _skip_empty_token_spans
        self._told_of_unknown = False

    def adapt(self, source: Sequence[Span] | Sequence[ReadableSpan], /) -> list[Triplet]:
        """Return the triplets of the spans of one attempt in the order of the calls.

        Raises:
            ValueError: there are no spans.
        """
        reading = self.read(source)
        log_problems(reading.problems, source)
        return reading.triplets

    def read(self, source: Sequence[Span] | Sequence[ReadableSpan], /) -> TripletReading:
        """Return what `adapt` returns, together with a list of what was left out."""
        with garbage_collection_paused():
            spans = [_stored(span) for span in source]
            work = without_helpers(spans, self.ignore)
            if spans and not work:
                return TripletReading([])
            tree = self._tree(work)
            triplets = tree.to_trajectory(
                llm_call_match=self.llm_call_match,
                agent_match=self.agent_match,
                exclude_llm_call_in_reward=self.exclude_llm_call_in_reward,
                reward_match=self.reward_match,
                policy=self.policy,
                _skip_empty_token_spans=self._skip_empty_token_spans,
            )
        return TripletReading(triplets, tree.problems)

    def select(self, source: Sequence[Span], calls: Sequence[ModelCall], /) -> CallSelection:
        """Return those of the calls that the adapter selects, without making triplets of them."""
        if type(self).read is not TracerTraceToTriplet.read:  # a subclass chooses among the triplets
            return super().select(source, calls)
        source, calls = self._of_the_work(source, calls)
        if not source:
            return CallSelection([], [])
        with garbage_collection_paused():
            tree, by_name = self._tree([_stored(span) for span in source]), calls_by_name(calls)
            rules = SelectionRules(
                self.llm_call_match, self.agent_match, self.exclude_llm_call_in_reward, policy=self.policy
            )
            chosen: list[SelectedCall[TraceTree]] = []
            selected: list[ModelCall] = []
            for node, span in tree.answered(tree.ordered_calls(rules)):
                call = by_name.get(call_name(span))
                if self._skip_empty_token_spans and not (call and call.has_tokens):
                    tree.report_empty(span)
                    continue
                chosen.append(node)
                if call is not None:
                    selected.append(call.of_agent(None if node.agent_name == ANY_AGENT else node.agent_name))
            tree.matched_rewards(chosen, self.reward_match)
        self._tell_of_unknown(tree.problems)
        return CallSelection(selected, tree.problems)

    def _tell_of_unknown(self, problems: Sequence[Problem]) -> None:
        """Warn once of calls that were refused because nothing proves whose they are."""
        first = next((problem for problem in problems if problem.kind == "unknown_agent"), None)
        if first is not None and not self._told_of_unknown:
            self._told_of_unknown = True
            logger.warning(
                "A model call is not trained (unknown_agent; further ones are not told): span %s: %s. Give each "
                "agent a resource of its own, llm_proxy.as_resource(role='<name>'): its URL says whose call it is.",
                first.span_id,
                first.detail,
            )

    def visualize(
        self,
        source: Sequence[Span] | Sequence[ReadableSpan],
        /,
        filename: str = "trace_tree",
        interested_span_match: str | None = None,
    ) -> TraceTree:
        """Draw the tree that the triplets are made from into `filename.png`, and return it."""
        spans = [_stored(span) for span in source]
        tree = self._tree(without_helpers(spans, self.ignore) or spans)
        tree.visualize(filename, interested_span_match)
        return tree

    def _tree(self, spans: Sequence[Span]) -> TraceTree:
        tree = TraceTree.from_spans(spans)
        if self.repair_hierarchy:
            tree.repair_hierarchy()
        return tree


class LlmProxyTraceToTriplet(TraceToTripletBase):
    """Triplets out of the gateway's spans alone, by their sequence ids: neither tree nor clocks are used.

    Only calls with token ids count. A reward goes to the newest call without one whose sequence id is smaller. Beside
    what the described system gave, a triplet holds log-probabilities, finish reason, weight version and call id where
    the span has them; late and failed calls are left out, and lost rewards are listed by `read`.

    Args:
        policy: Only calls of this policy of the gateway. None is every call, but for those of policies that are frozen
            or external.
        ignore: As for `TracerTraceToTriplet`.
    """

    def __init__(self, *, policy: str | None = None, ignore: Ignore | None = None) -> None:
        self.policy = checked_policy(policy)
        self.ignore = checked_ignore(ignore)

    def adapt(self, source: Sequence[Span], /) -> list[Triplet]:
        """Return the triplets in the order of the sequence ids; none for no spans."""
        reading = self.read(source)
        log_problems(reading.problems, source)
        return reading.triplets

    def read(self, source: Sequence[Span], /) -> TripletReading:
        """Return what `adapt` returns, together with a list of what was left out."""
        return self._read(without_helpers(source, self.ignore), {})

    def select(self, source: Sequence[Span], calls: Sequence[ModelCall], /) -> CallSelection:
        """Return those of the calls that the adapter selects, without reading their spans again."""
        if type(self).read is not LlmProxyTraceToTriplet.read:  # a subclass chooses among the triplets
            return super().select(source, calls)
        source, calls = self._of_the_work(source, calls)
        known = {id(call.spans.record): call.spans.reading for call in calls if call.spans is not None}
        return self._selection(self._read(source, known), calls)

    def _read(self, source: Sequence[Span], known: Mapping[int, CallReading | None]) -> TripletReading:
        """Read the triplets; `known` is what was read already, by the ids of the span objects."""
        triplets, problems = list[Triplet](), list[Problem]()
        unrewarded: list[tuple[int, Triplet]] = []
        seen: set[str] = set()
        with garbage_collection_paused():
            for span in sorted(source, key=lambda span: (span.sequence_id, span.start_time or 0.0)):
                if is_stale(span):
                    continue
                if (value := reward_value(span)) is not None:
                    older = (at for at in reversed(range(len(unrewarded))) if unrewarded[at][0] < span.sequence_id)
                    if (newest := next(older, None)) is not None:
                        put_reward(unrewarded.pop(newest)[1], span)
                    else:
                        problems.append(Problem("lost_reward", span.span_id, f"reward {value} found no call"))
                if is_of_other_policy(span, self.policy) or span.name not in _GATEWAY_SPANS or has_failed(span):
                    continue
                call = known.get(id(span)) or read_call(span, problems)
                identity = call.call_id or call.response_id
                if not (call.prompt_token_ids and call.completion_token_ids) or identity in seen:
                    continue
                if identity is not None:
                    seen.add(identity)
                logprobs = {} if call.logprobs is None else {"token_logprobs": call.logprobs}
                triplet = Triplet(
                    prompt={"token_ids": call.prompt_token_ids},
                    response={"token_ids": call.completion_token_ids, **logprobs},
                    metadata={"response_id": call.response_id, **known_metadata(call, span)},
                )
                triplets.append(triplet)
                unrewarded.append((span.sequence_id, triplet))
        return TripletReading(triplets, problems)


def _stored(span: Span | ReadableSpan) -> Span:
    return span if isinstance(span, Span) else Span.from_opentelemetry(span, "dummy", "dummy", 0)


def _expression(name: str, value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{name}={value!r} is not a regular expression: {error}") from error
    return value
