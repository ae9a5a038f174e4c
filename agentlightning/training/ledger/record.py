"""What one finished rollout gives to a training step: its reward, its token rows, and why each other call is left out.

Pure: everything comes in as arguments. The rules, in the order in which they apply to a call:

1. A rollout that was not sampled for training trains nothing.
2. Only the latest attempt counts: calls of older ones are `superseded_attempt`, those that the store marked `stale`.
3. A call that is no turn of the agent's work is a `helper`; the adapter says which.
4. A call that gave the agent no answer, or by its nature generates nothing, is excluded by how it ended.
5. The attempt's outcome decides (`attempt_verdict`), then the reward: none is never filled in.
6. A scored attempt one of whose calls was refused for good (`refused_for_good`) trains nothing unless it is asked for,
   and one without any call of the policy has nothing to train.
7. The adapter selects among the calls that are left.
8. A call that has no token ids, or not one log-probability per token, cannot be trained.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from agentlightning.adapter.calls.calls import (
    CallRef,
    ModelCall,
    is_call_of_other_policy,
    model_calls,
    of_unknown_agents,
    policies_of,
)
from agentlightning.adapter.calls.helpers import is_known_helper, without_calls
from agentlightning.adapter.calls.refusals import REFUSED_CALL, refused_for_good
from agentlightning.adapter.explain import Explanation, explain_calls
from agentlightning.adapter.rows.drift import Decode
from agentlightning.adapter.rows.samples import Sample, SampleReading, samples_from_calls, unusable
from agentlightning.adapter.rows.seams import RowCause
from agentlightning.adapter.spans.attributes import Problem
from agentlightning.adapter.spans.rewards import final_dimensions, final_reward
from agentlightning.adapter.spans.tokens import FAILED_STATES, has_failed, is_gateway_call, is_stale, refused_for_budget
from agentlightning.adapter.triplet import TracerTraceToTriplet, TraceToTripletBase
from agentlightning.field_help import explain_fields
from agentlightning.types import Attempt, Outcome, Rollout, Span

ExclusionReason = Literal[
    # what the call itself is
    "no_generation",
    "no_tokens",
    "no_logprobs",
    "bad_logprobs",
    "image_input",
    "upstream_error",
    "refused",
    "client_left",
    "stale",
    "not_selected",
    "helper",
    "unknown_agent",
    # what became of its attempt
    "superseded_attempt",
    "infrastructure_fault",
    "cancelled",
    "budget",
    "no_reward",
    "unfinished",
    "refused_call",
    "no_call",
    # what the algorithm decided
    "not_a_train_rollout",
    "too_stale",
    "not_chosen",
    "no_group",
    "equal_rewards",
    "over_length",
    "step_skipped",
    "step_undone",
]
"""Why a model call is not trained: the closed list.

`no_generation`: there was nothing to generate (embeddings). `image_input`: its prompt shows images, and rows hold
tokens of text alone. `not_selected`: the adapter left it out (a grader's call,
another agent's or another policy's; all of them, where several policies are trained and the adapter names none).
`helper`: it is no turn of the agent's work, but a title, a summary or the like. `refused_call`: a call of its attempt
was refused for good, so the reward tells nothing of the policy. `no_call`: a rollout has a reward and no call of the
policy, as where a cache of the agent's client answered; no call can have this reason, a rollout can.
`unknown_agent`: the adapter selects by the name of the agent, agents ran side by side, and nothing proves whose call it
was; a role in the URL (`LLMProxy.as_resource(role=)`) tells it.
`too_stale`: a reply of its group is of weights more than `max_staleness` versions old.
`not_chosen`: supervised fine-tuning did not choose its rollout.
`budget`: it was refused for its budget, or its attempt ended because of one. `unfinished`: its attempt had not ended
when the step closed. `no_group`: too few of its group's rollouts are usable. `equal_rewards`: all rewards of its group
are the same, so there is nothing to learn. `step_undone`: the run was started again from before its step, and the step
was taken anew.
"""

TRAINED_OUTCOMES: frozenset[Outcome] = frozenset(("scored", "policy_fault"))


@explain_fields
@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """One rollout, read for training. Every call in `calls` is in exactly one of `samples` and `exclusions`."""

    rollout_id: str
    """The rollout that was read."""
    attempt_id: str | None
    """The latest attempt; None if nobody claimed the rollout."""
    outcome: Outcome | None
    """The latest attempt's."""
    verdict: ExclusionReason | None
    """Why nothing of the rollout is trained; None if its calls may be."""
    reward: float | None
    """The final reward of the latest attempt, also of rollouts that are not trained (evaluation)."""
    dimensions: dict[str, float] = field(default_factory=dict[str, float])
    """The dimensions of that reward by name; none where it has only one without a name."""
    reading: SampleReading = field(default_factory=lambda: SampleReading([], []))
    """The rows, and why each began."""
    calls: list[ModelCall] = field(default_factory=list[ModelCall])
    """Of all attempts, in the order of arrival."""
    exclusions: dict[CallRef, ExclusionReason] = field(default_factory=dict[CallRef, ExclusionReason])
    """Why each call that is in no row is left out."""
    problems: list[Problem] = field(default_factory=list[Problem])
    """What could not be read of the spans."""

    @property
    def samples(self) -> list[Sample]:
        return self.reading.samples

    @property
    def seams(self) -> dict[RowCause, int]:
        """How many rows each cause began."""
        return self.reading.seam_counts()

    def explain(self, decode: Decode | None = None) -> Explanation:
        """Return what became of each call; print it to read it. `decode` shows tokens at seams as text too."""
        return explain_calls(self.rollout_id, self.calls, [self.reading], self.exclusions, decode)


def attempt_verdict(attempt: Attempt, is_latest: bool) -> ExclusionReason | None:
    """Return why nothing of an attempt is trained; None if its outcome allows it.

    Only `scored` and `policy_fault` do. An attempt that succeeded under a runner that states no outcome is allowed too:
    its reward decides.
    """
    if not is_latest:
        return "superseded_attempt"
    if attempt.outcome in TRAINED_OUTCOMES:
        return None
    if attempt.outcome_reason == "budget":
        return "budget"
    if attempt.outcome == "unscored":
        return "no_reward"
    if attempt.outcome == "cancelled" or (attempt.outcome is None and attempt.status == "timeout"):
        return "cancelled"
    if attempt.outcome is not None:
        return "infrastructure_fault"
    if attempt.status == "succeeded":
        return None
    return "unfinished" if attempt.status in ("preparing", "running") else "infrastructure_fault"


def read_rollout(
    rollout: Rollout,
    attempts: Sequence[Attempt],
    spans: Sequence[Span],
    adapter: TraceToTripletBase | None = None,
    *,
    decode: Decode | None = None,
    train_refused: bool = False,
    policies: Collection[str] | None = None,
) -> RolloutRecord:
    """Return what a rollout gives to a training step. `spans` are those of all its attempts.

    `decode` turns token ids into their text: see `samples_from_calls`. With `train_refused` a rollout is trained
    although one of its calls was refused for good. `policies` are those that learn, where several do: each row is of
    one of them.

    Raises:
        LedgerError: the adapter made a triplet that names no recorded call, or changed the tokens of one.
    """
    problems: list[Problem] = []
    calls = model_calls(spans, problems)
    latest = max(attempts, key=lambda attempt: attempt.sequence_id, default=None)
    counted = [] if latest is None else _counted(spans, latest)
    reward, dimensions = final_reward(counted), final_dimensions(counted)
    adapter = adapter or TracerTraceToTriplet()
    helpers = {call.ref for call in calls if adapter.is_helper(call)}
    own = [call for call in calls if latest is not None and call.ref.attempt_id == latest.attempt_id and not call.stale]
    work = [call for call in own if call.ref not in helpers]
    verdict = _verdict(rollout, latest, reward)
    if verdict is None and not train_refused and latest is not None and _was_refused(latest, work):
        verdict = REFUSED_CALL
    others = {call.ref for call in calls if is_call_of_other_policy(call, adapter.policy)}
    if policies is not None:
        others |= {call.ref for call in calls if call.policy not in policies}
    if verdict is None and all(call.ref in others for call in work):
        verdict = "no_call"
    exclusions: dict[CallRef, ExclusionReason] = {
        call.ref: reason for call in calls if (reason := _exclusion(call, latest, verdict, helpers)) is not None
    }
    candidates = [call for call in calls if call.ref not in exclusions]
    counted = without_calls(counted, [call for call in own if call.ref in helpers])
    selected: dict[CallRef, ModelCall] = {}
    unknown: set[CallRef] = set()
    if candidates:
        selection = adapter.select(counted, candidates)
        problems.extend(selection.problems)
        selected = {call.ref: call for call in selection.calls if policies is None or call.ref not in others}
        unknown = of_unknown_agents(candidates, selection.problems)
    if policies is None and adapter.policy is None and len(policies_of(selected.values())) > 1:
        selected = {}  # which of them is trained here, only the adapter's policy= can tell
    reading = samples_from_calls(list(selected.values()), decode=decode)
    if verdict == "no_call" and reading.samples:
        verdict = None  # an adapter of the user's own selects what it wants
    in_rows = {ref for sample in reading.samples for ref in sample.call_refs()}
    for call in candidates:
        if call.ref not in in_rows:
            left_out = "unknown_agent" if call.ref in unknown else "not_selected"
            exclusions[call.ref] = "not_selected" if call.ref in others else unusable(call) or left_out
    return RolloutRecord(
        rollout_id=rollout.rollout_id,
        attempt_id=None if latest is None else latest.attempt_id,
        outcome=None if latest is None else latest.outcome,
        verdict=verdict,
        reward=reward,
        dimensions={} if reward is None else dimensions,
        reading=reading,
        calls=[selected.get(call.ref, call) for call in calls],
        exclusions=exclusions,
        problems=problems,
    )


def _counted(spans: Sequence[Span], latest: Attempt) -> list[Span]:
    """Return the spans of the latest attempt that were not late, in their order."""
    own = (span for span in spans if span.attempt_id == latest.attempt_id and not is_stale(span))
    return sorted(own, key=lambda span: span.sequence_id)


def _verdict(rollout: Rollout, latest: Attempt | None, reward: float | None) -> ExclusionReason | None:
    """Return why the rollout as a whole is not trained; None if it is."""
    if rollout.mode in ("val", "test"):
        return "not_a_train_rollout"
    verdict = "unfinished" if latest is None else attempt_verdict(latest, is_latest=True)
    if verdict == "unfinished" and rollout.status == "cancelled":
        return "cancelled"
    return verdict or ("no_reward" if reward is None else None)


def refusal_of(attempt: Attempt, spans: Sequence[Span]) -> str | None:
    """Return `refused_call` for an attempt that was scored although one of its calls was refused for good.

    None for every other attempt, and for one whose end has a reason already: a fault of the policy is the user's word.
    `spans` are those of the attempt that were not late.
    """
    scored = attempt.outcome == "scored" or (attempt.outcome is None and attempt.status == "succeeded")
    if not scored or attempt.outcome_reason is not None or not any(map(_tells_no_answer, spans)):
        return None
    work = [call for call in model_calls(spans) if not is_known_helper(call)]
    return REFUSED_CALL if refused_for_good(work) else None


def _tells_no_answer(span: Span) -> bool:
    return is_gateway_call(span) and has_failed(span)


def _was_refused(latest: Attempt, work: Sequence[ModelCall]) -> bool:
    return latest.outcome != "policy_fault" and bool(refused_for_good(work))


def _exclusion(
    call: ModelCall, latest: Attempt | None, verdict: ExclusionReason | None, helpers: Collection[CallRef]
) -> ExclusionReason | None:
    if verdict == "not_a_train_rollout":
        return verdict
    if call.stale:
        return "stale"
    if latest is None or call.ref.attempt_id != latest.attempt_id:
        return "superseded_attempt"
    if call.ref in helpers:
        return "helper"
    if call.state == "refused" and (latest.outcome_reason == "budget" or _was_over_budget(call)):
        return "budget"
    if call.state == "no_generation" or call.state in FAILED_STATES:
        return cast(ExclusionReason, call.state)  # the names of the two lists are the same
    return None if verdict == "no_call" else verdict  # what other policies were asked was not selected


def _was_over_budget(call: ModelCall) -> bool:
    return call.spans is not None and refused_for_budget(call.spans.record)
