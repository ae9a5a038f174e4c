"""The training ledger: the outcome of every model call of a training step, trained or excluded with a reason.

The rules of `read_rollout`, in the order in which they apply; the first rule with a reason counts.

1. A rollout that was not sampled for training trains nothing.
2. Only the latest attempt counts: calls of older ones are `superseded_attempt`, those that the store marked `stale`.
3. A call that is not a turn of the agent's task is a `helper`; the adapter decides which calls are helpers.
4. A call that returned no reply to the agent, or that never generates text, is excluded according to its outcome.
5. The attempt's outcome decides (`attempt_verdict`), then the reward: a missing reward is never filled in.
6. A scored attempt with a finally refused call (`refused_for_good`) trains nothing, unless requested.
7. A rollout without any call of the policy has nothing to train (`no_call`); its calls have reasons by other rules.
8. A call of another policy is `not_selected`.
9. A call that has no token ids, or not one log-probability per token, cannot be trained (`unusable`).
10. The adapter selects among the remaining calls.
11. Only the first `max_rows` rows are trained; the calls of the others are excluded as `row_limit`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from agentlightning.adapter.calls.calls import (
    CallRef,
    ModelCall,
    call_id_of,
    calls_by_name,
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
from agentlightning.adapter.spans.rewards import final_dimensions, final_reward, reward_value
from agentlightning.adapter.spans.tokens import FAILED_STATES, has_failed, is_gateway_call, is_stale, refused_for_budget
from agentlightning.adapter.triplet import TracerTraceToTriplet, TraceToTripletBase
from agentlightning.base.field_help import explain_fields
from agentlightning.base.terminal import counted
from agentlightning.emitter.reward import get_reward_target
from agentlightning.errors import LedgerError
from agentlightning.types import Attempt, Outcome, Rollout, Span

_NAMED_AT_MOST = 8

ExclusionReason = Literal[
    # caused by the call itself
    "no_generation",  # there was nothing to generate (embeddings)
    "no_tokens",
    "no_logprobs",
    "bad_logprobs",
    "image_input",  # its prompt has images, and rows hold only text tokens
    "upstream_error",
    "refused",
    "client_left",
    "stale",
    "not_selected",  # by the adapter: a call of a grader, another agent or another policy, or an ambiguous one
    "helper",  # no turn of the agent's work, such as a title or a summary
    "unknown_agent",  # agents ran concurrently; a role in the URL (`LLMProxy.as_resource(role=)`) distinguishes them
    # caused by its attempt
    "superseded_attempt",
    "infrastructure_fault",
    "cancelled",
    "budget",  # the call was refused for its budget, or its attempt ended because of one
    "no_reward",
    "unfinished",  # the attempt had not ended when the step closed
    "refused_call",  # a call of the attempt was finally refused, so the reward does not measure the policy
    "no_call",  # only for a rollout: it has a reward but no call of the policy, as after an agent's cache hit
    # caused by the algorithm
    "not_a_train_rollout",
    "too_stale",  # a reply of its group is of weights more than `max_staleness` versions old
    "not_chosen",  # supervised fine-tuning did not choose its rollout
    "no_group",  # too few of its group's rollouts are usable
    "equal_rewards",  # all rewards of its group are the same, so there is nothing to learn
    "over_length",
    "row_limit",  # its rollout has more than `max_rows_per_rollout` rows, and its row is not among the first ones
    "step_skipped",
    "step_undone",  # the run was restarted from before its step, and the step was repeated
]
"""The closed list of reasons for excluding a model call from training."""


# --- one rollout -----------------------------------------------------------------------------------------------------


@explain_fields
@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """One rollout as read for training. Every call in `calls` is in exactly one of `samples` and `exclusions`."""

    rollout_id: str
    attempt_id: str | None
    """The latest attempt; None if no runner claimed the rollout."""
    outcome: Outcome | None
    """Outcome of the latest attempt."""
    verdict: ExclusionReason | None
    """The reason for excluding the full rollout from training; None if its calls may be trained."""
    reward: float | None
    """The final reward of the latest attempt, also of rollouts that are not trained (evaluation)."""
    dimensions: dict[str, float] = field(default_factory=dict[str, float])
    """The dimensions of that reward by name; empty if it has only one dimension, without a name."""
    reading: SampleReading = field(default_factory=lambda: SampleReading([], []))
    """All rows, and the reason why each row begins."""
    calls: list[ModelCall] = field(default_factory=list[ModelCall])
    """Model calls of all attempts, in the order of arrival."""
    exclusions: dict[CallRef, ExclusionReason] = field(default_factory=dict[CallRef, ExclusionReason])
    """The reason of each call that is in none of `samples`."""
    problems: list[Problem] = field(default_factory=list[Problem])
    """Parts of the spans that could not be read."""
    max_rows: int | None = None
    """Maximum number of `samples`; None is no limit."""
    call_rewards: dict[CallRef, float] = field(default_factory=dict[CallRef, float])
    """The rewards that were emitted for calls, steps and agents, each with the call that it belongs to; only if they
    were requested."""

    @property
    def samples(self) -> list[Sample]:
        """The rows that may be trained: the first `max_rows` of `reading`."""
        return self.reading.samples[: self.max_rows]

    @property
    def seams(self) -> dict[RowCause, int]:
        """The number of rows that each cause began."""
        return self.reading.seam_counts()

    def explain(self, decode: Decode | None = None) -> Explanation:
        """Return the outcome of each call as text. With `decode`, tokens at seams are also shown as text."""
        return explain_calls(self.rollout_id, self.calls, [self.reading], self.exclusions, decode)


def read_rollout(
    rollout: Rollout,
    attempts: Sequence[Attempt],
    spans: Sequence[Span],
    adapter: TraceToTripletBase | None = None,
    *,
    decode: Decode | None = None,
    train_refused: bool = False,
    policies: Collection[str] | None = None,
    max_rows: int | None = None,
    credit: bool = False,
) -> RolloutRecord:
    """Return the record of a rollout for a training step. `spans` are those of all its attempts.

    `decode` converts token ids to text: see `samples_from_calls`. With `train_refused`, a rollout with a finally
    refused call is trained. `policies`: the policies that learn, if there are several; each row belongs to one of them.
    `max_rows`: maximum number of rows to train; None is no limit. `credit`: also read the rewards of calls.

    Raises:
        LedgerError: the adapter returned a triplet of a call that is not recorded, or changed the tokens of a call.
    """
    rules = _Rules(rollout, attempts, spans, adapter or TracerTraceToTriplet(), train_refused, policies)
    exclusions: dict[CallRef, ExclusionReason] = {
        call.ref: reason for call in rules.calls if (reason := rules.before_selection(call)) is not None
    }
    candidates = [call for call in rules.calls if call.ref not in exclusions]
    selected, unknown = rules.select(candidates)
    reading = samples_from_calls(list(selected.values()), decode=decode)
    in_rows = {ref for sample in reading.samples for ref in sample.call_refs()}
    for call in candidates:
        if call.ref not in in_rows:
            exclusions[call.ref] = rules.without_row(call, unknown)
    for sample in [] if max_rows is None else reading.samples[max_rows:]:
        exclusions |= dict.fromkeys(sample.call_refs(), "row_limit")
    latest = rules.latest
    return RolloutRecord(
        rollout_id=rollout.rollout_id,
        attempt_id=None if latest is None else latest.attempt_id,
        outcome=None if latest is None else latest.outcome,
        verdict=rules.of_rollout or rules.rule_7_no_call(reading),
        reward=rules.reward,
        dimensions={} if rules.reward is None else final_dimensions(rules.counted),
        reading=reading,
        calls=[selected.get(call.ref, call) for call in rules.calls],
        exclusions=exclusions,
        problems=rules.problems,
        max_rows=max_rows,
        call_rewards=rules.call_rewards(selected) if credit else {},
    )


class _Rules:
    """The rules of this module for one rollout: each returns the reason for an exclusion, or None."""

    def __init__(
        self,
        rollout: Rollout,
        attempts: Sequence[Attempt],
        spans: Sequence[Span],
        adapter: TraceToTripletBase,
        train_refused: bool,
        policies: Collection[str] | None,
    ) -> None:
        self._rollout, self._adapter, self._policies = rollout, adapter, policies
        self._train_refused = train_refused
        self.problems: list[Problem] = []
        self.calls = model_calls(spans, self.problems)
        self.latest = max(attempts, key=lambda attempt: attempt.sequence_id, default=None)
        self.counted = counted_spans(spans, self.latest)
        self.reward = final_reward(self.counted)
        self._helpers = {call.ref for call in self.calls if adapter.is_helper(call)}
        self._others = {call.ref for call in self.calls if self._is_of_other_policy(call)}
        self._own = [call for call in self.calls if self.rule_2_attempt(call) is None]
        self._work = [call for call in self._own if call.ref not in self._helpers]
        self.of_rollout: ExclusionReason | None = (
            self.rule_1_mode() or self.rule_5_outcome() or self.rule_6_refused_call()
        )

    def _is_of_other_policy(self, call: ModelCall) -> bool:
        is_not_learning = self._policies is not None and call.policy not in self._policies
        return is_not_learning or is_call_of_other_policy(call, self._adapter.policy)

    # --- the order of the rules --------------------------------------------------------------------------------------

    def before_selection(self, call: ModelCall) -> ExclusionReason | None:
        """Apply rules 1 to 6 to a call."""
        return (
            self.rule_1_mode()
            or self.rule_2_attempt(call)
            or self.rule_3_helper(call)
            or self.rule_4_no_answer(call)
            or self.of_rollout
        )

    def without_row(self, call: ModelCall, unknown: Collection[CallRef]) -> ExclusionReason:
        """Apply rules 8 to 10 to a call that is in no row; the agents of `unknown` calls cannot be distinguished."""
        return self.rule_8_policy(call) or unusable(call) or self.rule_10_selection(call, unknown)

    # --- the rules ---------------------------------------------------------------------------------------------------

    def rule_1_mode(self) -> ExclusionReason | None:
        return "not_a_train_rollout" if self._rollout.mode in ("val", "test") else None

    def rule_2_attempt(self, call: ModelCall) -> ExclusionReason | None:
        if call.stale:
            return "stale"
        is_latest = self.latest is not None and call.ref.attempt_id == self.latest.attempt_id
        return None if is_latest else "superseded_attempt"

    def rule_3_helper(self, call: ModelCall) -> ExclusionReason | None:
        return "helper" if call.ref in self._helpers else None

    def rule_4_no_answer(self, call: ModelCall) -> ExclusionReason | None:
        ended_by_budget = self.latest is not None and self.latest.outcome_reason == "budget"
        if call.state == "refused" and (
            ended_by_budget or (call.spans is not None and refused_for_budget(call.spans.record))
        ):
            return "budget"
        if call.state == "no_generation" or call.state in FAILED_STATES:
            return cast(ExclusionReason, call.state)  # the names of the two lists are the same
        return None

    def rule_5_outcome(self) -> ExclusionReason | None:
        reason = "unfinished" if self.latest is None else attempt_verdict(self.latest)
        if reason == "unfinished" and self._rollout.status == "cancelled":
            return "cancelled"
        return reason or ("no_reward" if self.reward is None else None)

    def rule_6_refused_call(self) -> ExclusionReason | None:
        is_fault = self.latest is not None and self.latest.outcome == "policy_fault"
        return REFUSED_CALL if not self._train_refused and not is_fault and refused_for_good(self._work) else None

    def rule_7_no_call(self, reading: SampleReading) -> ExclusionReason | None:
        """A custom adapter may select rows without a call of the policy."""
        has_call = any(call.ref not in self._others for call in self._work)
        return None if has_call or reading.samples else "no_call"

    def rule_8_policy(self, call: ModelCall) -> ExclusionReason | None:
        return "not_selected" if call.ref in self._others else None

    def rule_10_selection(self, call: ModelCall, unknown: Collection[CallRef]) -> ExclusionReason:
        return "unknown_agent" if call.ref in unknown else "not_selected"

    def select(self, candidates: Sequence[ModelCall]) -> tuple[dict[CallRef, ModelCall], Collection[CallRef]]:
        """Return the calls that the adapter selects for rows, and the calls of agents that it cannot distinguish."""
        if not candidates:
            return {}, ()
        agent_spans = without_calls(self.counted, [call for call in self._own if call.ref in self._helpers])
        selection = self._adapter.select(agent_spans, candidates)
        self.problems.extend(selection.problems)
        unknown = of_unknown_agents(candidates, selection.problems)
        if self._policies is not None:
            return {call.ref: call for call in selection.calls if call.ref not in self._others}, unknown
        if self._adapter.policy is None and len(policies_of(selection.calls)) > 1:
            return {}, unknown  # only the adapter's policy= decides which of them is trained here
        return {call.ref: call for call in selection.calls}, unknown

    def call_rewards(self, selected: Mapping[CallRef, ModelCall]) -> dict[CallRef, float]:
        """Return the rewards of calls, summed per call: all except the outcome and those with the target `rollout`.

        The outcome is the last reward, unless it has a target; with a group reward it is also the agent's own. The
        adapter assigns each reward to a call; the reward of an agent belongs to its newest call at that time.
        """
        emitted = [span for span in self.counted if reward_value(span) is not None]
        targets = [get_reward_target(span).target for span in emitted]
        judged = self.latest is not None and self.latest.outcome_reason == "group_reward"
        outcomes = [place for place in range(len(emitted) - 1 - judged, len(emitted)) if place >= 0]
        counts = [
            not (target == "rollout" or (target is None and place in outcomes)) for place, target in enumerate(targets)
        ]
        rest = [span for span in self.counted if all(span is not each for each in emitted)]
        rest = list(without_calls(rest, [call for call in self._own if call.ref in self._helpers]))
        by_name, rewards = calls_by_name(list(selected.values())), dict[CallRef, float]()
        for span, target, is_of_call in zip(emitted, targets, counts, strict=True):
            if not is_of_call:
                continue
            value, calls = reward_value(span), list[ModelCall | None]()
            if target == "agent":
                name = get_reward_target(span).target_id
                own = [call for call in selected.values() if call.agent == name and call.sequence_id < span.sequence_id]
                calls = [max(own, key=lambda call: call.sequence_id, default=None)]
            elif target == "call":  # its id is that of the reply: no need to build the tree
                calls = [by_name.get(get_reward_target(span).target_id or "")]
            else:
                reading = self._adapter.read(sorted([*rest, span], key=lambda each: each.sequence_id))
                calls = [by_name.get(call_id_of(each) or "") for each in reading.triplets if each.reward is not None]
            found = next((call for call in calls if call is not None), None)
            if found is None:
                detail = f"a reward of {value} belongs to no call that is trained"
                self.problems.append(Problem("lost_reward", span.span_id, detail))
            elif value is not None:
                rewards[found.ref] = rewards.get(found.ref, 0.0) + value
        return rewards


# --- one attempt -----------------------------------------------------------------------------------------------------


def attempt_verdict(attempt: Attempt) -> ExclusionReason | None:
    """Return the reason for excluding a rollout with this latest attempt; None if its outcome allows training.

    Only `scored` and `policy_fault` allow it. A successful attempt without an outcome is also allowed: its reward
    decides.
    """
    if attempt.outcome in ("scored", "policy_fault"):
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


def counted_spans(spans: Sequence[Span], latest: Attempt | None) -> list[Span]:
    """Return the spans of the latest attempt that were not late, in their order."""
    attempt_id = None if latest is None else latest.attempt_id
    own = (span for span in spans if span.attempt_id == attempt_id and not is_stale(span))
    return sorted(own, key=lambda span: span.sequence_id)


def refusal_of(attempt: Attempt, spans: Sequence[Span]) -> str | None:
    """Return `refused_call` for an attempt that was scored although one of its calls was finally refused.

    None for every other attempt, and for one that already has a reason: only the user can declare a policy fault.
    `spans` are those of the attempt that were not late.
    """
    scored = attempt.outcome == "scored" or (attempt.outcome is None and attempt.status == "succeeded")
    if not scored or attempt.outcome_reason is not None:
        return None
    if not any(is_gateway_call(span) and has_failed(span) for span in spans):
        return None
    work = [call for call in model_calls(spans) if not is_known_helper(call)]
    return REFUSED_CALL if refused_for_good(work) else None


# --- one step --------------------------------------------------------------------------------------------------------


@explain_fields
@dataclass(frozen=True, slots=True)
class Trained:
    """The call is part of the update."""

    row: int
    """Index of its row in the step's batch."""
    tokens: int
    """Number of its trained tokens: all tokens that the policy produced in the call."""
    advantage: float
    """Advantage of its tokens in the loss; with a critic (PPO), the reward of its rollout instead."""
    weight_version: int
    """Version of the weights that served the call."""
    constrained_by: tuple[str, ...] = ()
    """Sampling settings that changed the distribution of its tokens from the learner's."""


CallEnding = Trained | ExclusionReason
"""The outcome of one call: part of the update, or the reason for its exclusion."""


@explain_fields
@dataclass(frozen=True, slots=True)
class LedgerSummary:
    """The counts of one step in model calls; `captured` is `trained` plus all of `excluded`."""

    step: int
    captured: int
    trained: int
    """Number of calls in the update."""
    trained_tokens: int
    excluded: dict[ExclusionReason, int]
    """Number of excluded calls by reason, the most frequent first."""
    constrained: dict[str, int] = field(default_factory=dict[str, int])
    """Number of trained calls with a constrained distribution by setting, the most frequent first; a call may count
    under several settings. Their log-probabilities are those of the unconstrained model."""


class Ledger:
    """The ledger of one training step. Belongs to the loop that runs the step; not thread-safe."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._calls: dict[CallRef, ModelCall] = {}
        self._endings: dict[CallRef, list[CallEnding]] = {}

    def add(self, record: RolloutRecord) -> None:
        """Capture the calls of a rollout and record those that are already excluded."""
        self.capture(record.calls)
        for ref, reason in record.exclusions.items():
            self._enter(ref, reason)

    def capture(self, calls: Iterable[ModelCall]) -> None:
        """Record each call, without an outcome yet.

        Raises:
            LedgerError: a call was captured before.
        """
        for call in calls:
            if call.ref in self._calls:
                raise LedgerError(f"step {self.step}: {_name(call.ref)} was captured twice. Add each rollout only once")
            self._calls[call.ref] = call

    def train(self, sample: Sample, *, row: int, advantage: float | Sequence[float]) -> None:
        """Record the calls of a row as trained, with the advantage of the rollout or that of each call.

        Raises:
            LedgerError: the numbers of trained tokens of the row and of its calls differ.
        """
        refs = sample.call_refs()
        tokens = {ref: len(self._calls[ref].completion_token_ids) for ref in refs if ref in self._calls}
        if len(tokens) == len(refs) and sum(tokens.values()) != sum(sample.mask):
            raise LedgerError(
                f"step {self.step}: row {row} of rollout {sample.rollout_id} has {sum(sample.mask)} trained tokens, "
                f"but its {counted(len(refs), 'model call')} contain {sum(tokens.values())}"
            )
        each = [advantage] * len(refs) if isinstance(advantage, (int, float)) else list(advantage)
        for ref, version, of_call in zip(refs, sample.weight_versions, each, strict=True):
            constrained_by = self._calls[ref].constrained_by if ref in self._calls else ()
            self._enter(ref, Trained(row, tokens.get(ref, 0), of_call, version, constrained_by))

    def exclude(self, calls: Iterable[CallRef] | Sample, reason: ExclusionReason) -> None:
        """Record calls, or all calls of a row, as excluded."""
        for ref in calls.call_refs() if isinstance(calls, Sample) else calls:
            self._enter(ref, reason)

    def calls(self) -> list[ModelCall]:
        """Return every captured call, in the order of capture."""
        return list(self._calls.values())

    def endings(self) -> dict[CallRef, CallEnding]:
        """Return the outcome of each call that has exactly one."""
        return {ref: endings[0] for ref, endings in self._endings.items() if len(endings) == 1}

    def close(self) -> LedgerSummary:
        """Return the counts.

        Raises:
            LedgerError: a call is neither trained nor excluded, is recorded more than once, or was never captured.
        """
        self._check()
        endings = self.endings().values()
        trained = [end for end in endings if isinstance(end, Trained)]
        excluded: Counter[ExclusionReason] = Counter(end for end in endings if not isinstance(end, Trained))
        return LedgerSummary(
            step=self.step,
            captured=len(self._calls),
            trained=len(trained),
            trained_tokens=sum(end.tokens for end in trained),
            excluded=dict(excluded.most_common()),
            constrained=dict(Counter(name for end in trained for name in end.constrained_by).most_common()),
        )

    def _enter(self, ref: CallRef, ending: CallEnding) -> None:
        self._endings.setdefault(ref, []).append(ending)

    def _check(self) -> None:
        wrong: list[str] = []
        for ref in {**self._calls, **self._endings}:
            endings = self._endings.get(ref, [])
            if ref not in self._calls or len(endings) != 1:
                ways = (f"trained in row {e.row}" if isinstance(e, Trained) else f"excluded as {e}" for e in endings)
                never = "" if ref in self._calls else " and was never captured"
                wrong.append(f"{_name(ref)} is {' and '.join(ways) or 'neither trained nor excluded'}{never}")
        if wrong:
            more = f"; and {len(wrong) - _NAMED_AT_MOST} more" if len(wrong) > _NAMED_AT_MOST else ""
            raise LedgerError(
                f"step {self.step}: {len(wrong)} of {len(self._calls)} model calls have no consistent outcome: "
                + "; ".join(wrong[:_NAMED_AT_MOST])
                + more
            )


def _name(ref: CallRef) -> str:
    return f"call {ref.call_id} (rollout {ref.rollout_id}, attempt {ref.attempt_id})"
