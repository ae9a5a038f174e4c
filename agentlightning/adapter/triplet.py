"""Adapters from the spans of one attempt to triplets: from the tree of all spans, or only from the gateway's spans."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from opentelemetry.sdk.trace import ReadableSpan

from agentlightning.adapter.base import TraceAdapter, garbage_collection_paused
from agentlightning.adapter.calls.calls import (
    ANY_AGENT,
    CallRef,
    CallSelection,
    ModelCall,
    call_of_triplet,
    calls_by_name,
    checked_policy,
    is_call_of_other_policy,
    model_calls,
    of_unknown_agents,
)
from agentlightning.adapter.calls.helpers import Ignore, helper_rule, without_calls, without_helpers
from agentlightning.adapter.explain import Explanation, explain_calls
from agentlightning.adapter.rows.drift import Decode
from agentlightning.adapter.rows.samples import SampleReading, samples_from_calls, unusable
from agentlightning.adapter.spans.attributes import Problem
from agentlightning.adapter.spans.rewards import reward_value
from agentlightning.adapter.spans.tokens import FAILED_STATES, call_name, is_stale, refused_for_budget
from agentlightning.adapter.tree.reward_matching import Recorded
from agentlightning.adapter.tree.reward_matching import RewardMatchPolicy as RewardMatchPolicy
from agentlightning.adapter.tree.selection import LLM_CALL_MATCH, SelectedCall, SelectionRules
from agentlightning.adapter.tree.tree import TraceTree as TraceTree
from agentlightning.adapter.tree.tree import known_metadata, put_reward
from agentlightning.base.field_help import Value, explain_fields
from agentlightning.semconv import RAW_SPAN, REQUEST_SPAN
from agentlightning.types import Span, Triplet

logger = logging.getLogger(__name__)


class Transition(Value):
    """One step of a trajectory in the format of the v0.1 protocol; this package does not create any."""

    state: list[int]
    """Token ids of the prompt."""
    action: list[int]
    """Token ids of the completion."""
    response_id: str | None = None
    """Id of the model's reply; None if it had none."""
    agent_name: str = ""
    """Agent that made the call."""
    reward: float | None = None
    """Reward of the step, or None."""


@explain_fields
@dataclass(frozen=True, slots=True)
class TripletReading:
    """Triplets, and the excluded parts of the trace."""

    triplets: list[Triplet]
    """The model calls as training data."""
    problems: list[Problem] = field(default_factory=list[Problem])
    """Excluded parts, and the reasons."""


class TraceToTripletBase(TraceAdapter[list[Triplet]]):
    """An adapter whose result can be trained on: it selects model calls, orders them and assigns their rewards.

    Each triplet names its call in `metadata`, by `call_id` or `response_id`, so that the training ledger can record it.
    """

    policy: str | None = None
    """Policy of the selected calls; None selects all calls, except those of policies that are not trained."""
    ignore: Ignore | None = None
    """Selects helper calls to exclude, in addition to those of known programs (`calls/helpers.py`): a regular
    expression that is searched in the prompt (`role: content`, a line per message), or a function of the call."""

    def is_helper(self, call: ModelCall) -> bool:
        """True for a call that is not a turn of the agent's task."""
        return helper_rule(self.ignore)(call)

    def read(self, source: Sequence[Span], /) -> TripletReading:
        """Return the result of `adapt`, together with a list of the excluded parts."""
        return TripletReading(self.adapt(source))

    def select(self, source: Sequence[Span], calls: Sequence[ModelCall], /) -> CallSelection:
        """Return the calls that the adapter selects. Calls and spans must belong to one attempt.

        The triplets of `read` determine the selection.

        Raises:
            LedgerError: a triplet has tokens but names no call, or its tokens differ from those of the call.
        """
        return self._selection(self.read(source), calls)

    def _selection(self, reading: TripletReading, calls: Sequence[ModelCall]) -> CallSelection:
        by_name = calls_by_name(calls)
        matches = (call_of_triplet(triplet, by_name, self) for triplet in reading.triplets)
        return CallSelection([call for call in matches if call is not None], reading.problems)

    def _of_the_work(
        self, source: Sequence[Span], calls: Sequence[ModelCall]
    ) -> tuple[Sequence[Span], Sequence[ModelCall]]:
        """Return spans and calls without the helper calls."""
        is_helper = helper_rule(self.ignore)
        helpers = [call for call in calls if is_helper(call)]
        refs = {call.ref for call in helpers}
        return without_calls(source, helpers), [call for call in calls if call.ref not in refs]

    def explain(self, source: Sequence[Span], /, *, decode: Decode | None = None) -> Explanation:
        """Return the outcome of every model call in the spans of a rollout, as an object to print.

        `decode` converts token ids to their text; with it, drift of the template and of the tokenizer are distinguished
        with certainty. Only `agl rollouts explain` checks whether the attempt's outcome and reward allow training.

        Raises:
            LedgerError: as for `select`.
        """
        calls = model_calls(source)
        attempts = dict.fromkeys(call.ref.attempt_id for call in calls)
        calls_with_agents, readings, reasons = list[ModelCall](), list[SampleReading](), dict[CallRef, str]()
        for attempt_id in attempts:
            own = [call for call in calls if call.ref.attempt_id == attempt_id]
            selection = self.select([span for span in source if span.attempt_id == attempt_id], own)
            selected = {call.ref: call for call in selection.calls}
            own = [selected.get(call.ref, call) for call in own]
            usable = [call for call in selected.values() if call.state not in FAILED_STATES and not call.stale]
            readings.append(samples_from_calls(usable, decode=decode))
            in_rows = {ref for sample in readings[-1].samples for ref in sample.call_refs()}
            unknown = of_unknown_agents(own, selection.problems)
            left_out = [call for call in own if call.ref not in in_rows]
            reasons.update({call.ref: _why_left_out(call, self, call.ref in unknown) for call in left_out})
            calls_with_agents.extend(own)
        calls_with_agents.sort(key=lambda call: call.sequence_id)
        rollout_id = source[0].rollout_id if source else "-"
        return explain_calls(rollout_id, calls_with_agents, readings, reasons, decode)


class TracerTraceToTriplet(TraceToTripletBase):
    """Creates triplets from the tree of all spans of an attempt. The default adapter.

    It reads the spans of tracers and the records of the gateway, and creates one triplet from the two spans of one
    call. Rules and departures from the described system are in `adapter/tree/`.

    Args:
        repair_hierarchy: Move spans without their parent to the position that their times suggest.
        llm_call_match: Regular expression for the names of the tracer's spans that are model calls.
        agent_match: Regular expression for names of agents and roles; only their calls count. A call with several
            possible agents counts if all of them match; otherwise it is excluded as `unknown_agent`. None selects all
            calls.
        exclude_llm_call_in_reward: Exclude calls made to compute a reward.
        reward_match: Rule that assigns rewards without a link to calls.
        policy: Only calls of this policy of the gateway. None selects all calls, except those of frozen or external
            policies.
        ignore: Exclude helper calls (titles, summaries): a regular expression that is searched in the prompt's text,
            or a function of the `ModelCall`. Those of known programs are always excluded.
        _skip_empty_token_spans: Exclude calls without token ids before rewards are matched.

    Raises:
        ValueError: one of the expressions is not valid, `reward_match` is unknown, or `policy` is not a name.
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
        self.ignore = _checked_ignore(ignore)
        self._skip_empty_token_spans = _skip_empty_token_spans
        self._told_of_unknown = False

    def adapt(self, source: Sequence[Span] | Sequence[ReadableSpan], /) -> list[Triplet]:
        """Return the triplets of the spans of one attempt in the order of the calls.

        Raises:
            ValueError: there are no spans.
        """
        reading = self.read(source)
        _log_problems(reading.problems, source)
        return reading.triplets

    def read(self, source: Sequence[Span] | Sequence[ReadableSpan], /) -> TripletReading:
        """Return the result of `adapt`, together with a list of the excluded parts."""
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
        """Return the calls that the adapter selects, without creating triplets."""
        if type(self).read is not TracerTraceToTriplet.read:  # a subclass selects among the triplets
            return super().select(source, calls)
        source, calls = self._of_the_work(source, calls)
        if not source:
            return CallSelection([], [])
        selected: list[ModelCall] = []
        with garbage_collection_paused():
            tree, by_name = self._tree([_stored(span) for span in source]), calls_by_name(calls)
            rules = SelectionRules(
                self.llm_call_match, self.agent_match, self.exclude_llm_call_in_reward, policy=self.policy
            )

            def has_tokens(each: SelectedCall) -> bool:
                call = by_name.get(call_name(each.span))
                return call is not None and call.has_tokens

            for each, _ in tree.chosen(rules, self.reward_match, has_tokens if self._skip_empty_token_spans else None):
                if (call := by_name.get(call_name(each.span))) is not None:
                    selected.append(call.of_agent(None if each.agent_name == ANY_AGENT else each.agent_name))
        self._tell_of_unknown(tree.problems)
        return CallSelection(selected, tree.problems)

    def _tell_of_unknown(self, problems: Sequence[Problem]) -> None:
        """Warn once of calls that were excluded because nothing proves which agent made them."""
        first = next((problem for problem in problems if problem.kind == "unknown_agent"), None)
        if first is not None and not self._told_of_unknown:
            self._told_of_unknown = True
            logger.warning(
                "A model call is excluded (unknown_agent; logged only once): span %s: %s. Give each agent its own "
                "resource, llm_proxy.as_resource(role='<name>'), so that the URL identifies the agent.",
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
        """Draw the tree of the triplets into `filename.png`, and return it."""
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
    """Creates triplets only from the gateway's spans, by their sequence ids; neither the tree nor times are used.

    Only calls with token ids count. A reward is assigned to the newest call without one whose sequence id is smaller.
    Beyond those of the described system, a triplet has log-probabilities, finish reason, weight version and call id if
    the span has them; late and failed calls are excluded, and lost rewards are listed by `read`.

    Args:
        policy: Only calls of this policy of the gateway. None selects all calls, except those of frozen or external
            policies.
        ignore: As for `TracerTraceToTriplet`.
    """

    def __init__(self, *, policy: str | None = None, ignore: Ignore | None = None) -> None:
        self.policy = checked_policy(policy)
        self.ignore = _checked_ignore(ignore)

    def adapt(self, source: Sequence[Span], /) -> list[Triplet]:
        """Return the triplets in the order of the sequence ids; empty without spans."""
        reading = self.read(source)
        _log_problems(reading.problems, source)
        return reading.triplets

    def read(self, source: Sequence[Span], /) -> TripletReading:
        """Return the result of `adapt`, together with a list of the excluded parts."""
        source, problems = without_helpers(source, self.ignore), list[Problem]()
        with garbage_collection_paused():
            calls = model_calls([span for span in source if span.name in (RAW_SPAN, REQUEST_SPAN)], problems)
            triplets: list[Triplet] = []
            for call, earned in self._chosen(source, calls, problems):
                assert call.spans is not None
                reading, span = call.spans.reading, call.spans.record
                assert reading is not None
                assert span is not None
                logprobs = {} if reading.logprobs is None else {"token_logprobs": reading.logprobs}
                triplet = Triplet(
                    prompt={"token_ids": reading.prompt_token_ids},
                    response={"token_ids": reading.completion_token_ids, **logprobs},
                    metadata={"response_id": reading.response_id, **known_metadata(reading, span)},
                )
                put_reward(triplet, earned)
                triplets.append(triplet)
        return TripletReading(triplets, problems)

    def select(self, source: Sequence[Span], calls: Sequence[ModelCall], /) -> CallSelection:
        """Return the calls that the adapter selects, without reading their spans again."""
        if type(self).read is not LlmProxyTraceToTriplet.read:  # a subclass selects among the triplets
            return super().select(source, calls)
        source, calls = self._of_the_work(source, calls)
        problems: list[Problem] = []
        return CallSelection([call for call, _ in self._chosen(source, calls, problems)], problems)

    def _chosen(
        self, source: Sequence[Span], calls: Sequence[ModelCall], problems: list[Problem]
    ) -> list[tuple[ModelCall, Span | None]]:
        """Return the calls with tokens that the gateway recorded, each with the span of its reward."""
        selection = [
            call
            for call in sorted(calls, key=lambda call: call.sequence_id)
            if call.spans is not None
            and call.spans.record is not None
            and (call.spans.reading is not None and call.spans.reading.has_tokens)
            and not (call.stale or call.state in FAILED_STATES or is_call_of_other_policy(call, self.policy))
        ]
        recorded, earned = Recorded((call.sequence_id, call.call_id) for call in selection), dict[str, Span]()
        for span in sorted(source, key=lambda span: (span.sequence_id, span.start_time or 0.0)):
            if is_stale(span) or (value := reward_value(span)) is None:
                continue
            newest = recorded.newest_before(span.sequence_id, earned)
            if newest is None:
                problems.append(Problem("lost_reward", span.span_id, f"reward {value} found no call"))
            else:
                earned[newest] = span
        return [(call, earned.get(call.call_id)) for call in selection]


def _why_left_out(call: ModelCall, adapter: TraceToTripletBase, is_unknown: bool) -> str:
    policy = adapter.policy
    if call.stale:
        return "stale"
    if adapter.is_helper(call):
        return "helper"
    if call.state in FAILED_STATES:
        return "budget" if call.spans is not None and refused_for_budget(call.spans.record) else call.state
    if is_call_of_other_policy(call, policy):
        return "not_selected"
    return unusable(call) or ("unknown_agent" if is_unknown else "not_selected")


def _checked_ignore(ignore: Ignore | None) -> Ignore | None:
    """Return the rule for helper calls after a check.

    Raises:
        ValueError: it is not a valid rule.
    """
    helper_rule(ignore)
    return ignore


def _log_problems(problems: Sequence[Problem], source: Sequence[Span] | Sequence[ReadableSpan]) -> None:
    """Log one line per trace with excluded parts; `read` returns the list."""
    if problems:
        first = problems[0]
        logger.warning(
            "%d spans: %d parts are excluded from the triplets; first part: %s on span %s (%s)",
            len(source),
            len(problems),
            first.kind,
            first.span_id,
            first.detail,
        )


def _stored(span: Span | ReadableSpan) -> Span:
    return span if isinstance(span, Span) else Span.from_opentelemetry(span, "dummy", "dummy", 0)


def _expression(name: str, value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{name}={value!r} is not a regular expression: {error}") from error
    return value
