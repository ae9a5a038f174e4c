"""What adapters to triplets share: how a selection is told, what was left out and why, and how a trace is explained."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from opentelemetry.sdk.trace import ReadableSpan

from agentlightning.adapter.base import TraceAdapter
from agentlightning.adapter.calls.calls import (
    CallRef,
    CallSelection,
    ModelCall,
    call_of_triplet,
    calls_by_name,
    is_call_of_other_policy,
    model_calls,
    of_unknown_agents,
)
from agentlightning.adapter.calls.helpers import Ignore, helper_rule, without_calls
from agentlightning.adapter.explain import Explanation, explain_calls
from agentlightning.adapter.rows.drift import Decode
from agentlightning.adapter.rows.samples import SampleReading, samples_from_calls, unusable
from agentlightning.adapter.spans.attributes import Problem
from agentlightning.adapter.spans.tokens import FAILED_STATES, refused_for_budget
from agentlightning.field_help import Value, explain_fields
from agentlightning.types import Span, Triplet

logger = logging.getLogger(__name__)


class Transition(Value):
    """One step of a trajectory in the form of the v0.1 protocol; nothing in this package makes one."""

    state: list[int]
    """Token ids that the model was given."""
    action: list[int]
    """Token ids that it produced."""
    response_id: str | None = None
    """The id of the model's reply; None if it had none."""
    agent_name: str = ""
    """The agent that made the call."""
    reward: float | None = None
    """What the step earned; None if nobody said."""


@explain_fields
@dataclass(frozen=True, slots=True)
class TripletReading:
    """Triplets, and what of the trace did not make it into one."""

    triplets: list[Triplet]
    """The model calls as training data."""
    problems: list[Problem] = field(default_factory=list[Problem])
    """What was left out, and why."""


class TraceToTripletBase(TraceAdapter[list[Triplet]]):
    """An adapter whose result can be trained on: it selects model calls, orders them and gives them their rewards.

    Each triplet names its call in `metadata`, by `call_id` or `response_id`, so that the training ledger can account
    for it.
    """

    policy: str | None = None
    """The policy whose calls are selected; None is every call, but for those of policies that are not trained."""
    ignore: Ignore | None = None
    """Which calls are helpers and are left out, beside those of known programs (`calls/helpers.py`): a regular
    expression that is searched in the prompt (`role: content`, a line per message), or a function of the call."""

    def is_helper(self, call: ModelCall) -> bool:
        """True for a call that is no turn of the agent's work."""
        return helper_rule(self.ignore)(call)

    def read(self, source: Sequence[Span], /) -> TripletReading:
        """Return what `adapt` returns, together with a list of what was left out."""
        return TripletReading(self.adapt(source))

    def select(self, source: Sequence[Span], calls: Sequence[ModelCall], /) -> CallSelection:
        """Return those of the calls that the adapter selects. Calls and spans are of one attempt.

        The triplets that `read` gives decide.

        Raises:
            LedgerError: a triplet has tokens and names no call, or its tokens are not those of the call.
        """
        return self._selection(self.read(source), calls)

    def _selection(self, reading: TripletReading, calls: Sequence[ModelCall]) -> CallSelection:
        by_name = calls_by_name(calls)
        found = (call_of_triplet(triplet, by_name, self) for triplet in reading.triplets)
        return CallSelection([call for call in found if call is not None], reading.problems)

    def _of_the_work(
        self, source: Sequence[Span], calls: Sequence[ModelCall]
    ) -> tuple[Sequence[Span], Sequence[ModelCall]]:
        """Return spans and calls without the helper calls."""
        is_helper = helper_rule(self.ignore)
        helpers = [call for call in calls if is_helper(call)]
        refs = {call.ref for call in helpers}
        return without_calls(source, helpers), [call for call in calls if call.ref not in refs]

    def explain(self, source: Sequence[Span], /, *, decode: Decode | None = None) -> Explanation:
        """Return what became of every model call in the spans of a rollout; print it to read it.

        `decode` turns token ids into their text; it tells a drift of the template from one of the tokenizer for
        certain. Whether the attempt's outcome and reward allow training is not asked here: `agl rollouts explain` does.

        Raises:
            LedgerError: as for `select`.
        """
        calls = model_calls(source)
        attempts = dict.fromkeys(call.ref.attempt_id for call in calls)
        named, readings, reasons = list[ModelCall](), list[SampleReading](), dict[CallRef, str]()
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
            named.extend(own)
        named.sort(key=lambda call: call.sequence_id)
        rollout_id = source[0].rollout_id if source else "-"
        return explain_calls(rollout_id, named, readings, reasons, decode)


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


def checked_ignore(ignore: Ignore | None) -> Ignore | None:
    """Return which calls are helpers, if they can be told by it.

    Raises:
        ValueError: they cannot.
    """
    helper_rule(ignore)
    return ignore


def log_problems(problems: Sequence[Problem], source: Sequence[Span] | Sequence[ReadableSpan]) -> None:
    """Say in one line per trace that something was left out; `read` gives the list."""
    if problems:
        first = problems[0]
        logger.warning(
            "%d spans: %d things were left out of the triplets, the first: %s on span %s (%s)",
            len(source),
            len(problems),
            first.kind,
            first.span_id,
            first.detail,
        )
