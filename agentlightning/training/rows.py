"""Chooses the token rows that one step trains, with their advantages, and records all others as excluded.

A group has the rollouts of one task. Rollouts without a usable reward or a trainable call are removed from their group,
because advantages compare only trained rollouts. A group with fewer than two rollouts, or with equal rewards, is
excluded with that reason; the step continues without an empty group. The loss is still a mean over all usable rows of
the step, including those of excluded groups. Otherwise a step with few trained rows would change the weights as much as
a step with many.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from agentlightning.adapter import TraceToTripletBase
from agentlightning.adapter.calls.calls import CallRef, ModelCall, model_calls
from agentlightning.adapter.rows.drift import Decode
from agentlightning.adapter.rows.samples import Sample
from agentlightning.errors import BadRequestError
from agentlightning.llm_proxy.access.admission import LOOKUP_SECONDS
from agentlightning.store.base import LightningStore
from agentlightning.training.ledger import ExclusionReason, Ledger, RolloutRecord, read_rollout
from agentlightning.training.loss_settings import Aggregation
from agentlightning.training.losses.advantages import (
    overlong_penalty,
    rollout_advantages,
    several_advantages,
    turn_advantages,
    weighted_reward,
)
from agentlightning.training.rollouts import Evidence, evidence
from agentlightning.training.settings import TrainingSettings
from agentlightning.types import Rollout


@dataclass
class StepRows:
    """The rows of one step: `samples` (B,) and `advantages` (B,), with details of their selection."""

    samples: list[Sample] = field(default_factory=list[Sample])
    advantages: list[float | list[float]] = field(default_factory=list[float | list[float]])
    """(B,) the advantage of each row's rollout, or those of its calls with `turn_advantage_weight`."""
    rewards: list[float] = field(default_factory=list[float])
    """Rewards of all rollouts with a usable reward, trained or not."""
    kept_rewards: list[float] = field(default_factory=list[float])
    """Rewards of the rollouts whose group was not replaced."""
    reward_error: float | None = None
    """Standard error of `mean_reward` over the tasks; None with fewer than two rollouts."""
    without_signal: list[Sample] = field(default_factory=list[Sample])
    """Rows that were excluded because their group has no advantages; they count in the mean of the loss."""
    records: list[RolloutRecord] = field(default_factory=list[RolloutRecord])
    """The record of every rollout, in order."""
    groups: list[int] = field(default_factory=list[int])
    """The group of each record."""
    group_counts: dict[str, int] = field(default_factory=dict[str, int])
    """Number of groups with a usable rollout (`compared`), and of groups with equal rewards (`equal_rewards`)."""

    def share(self, aggregation: Aggregation, takes: Callable[[Sample], bool] = lambda _: True) -> float:
        """Return the share of the rows in the step's mean, between 0 and 1; `takes` selects the rows that count."""
        count, others = (_counted_by(aggregation, filter(takes, rows)) for rows in (self.samples, self.without_signal))
        return count / (count + others) if count else 0.0

    def add(
        self,
        record: RolloutRecord,
        advantage: float,
        ledger: Ledger,
        reason: ExclusionReason | None,
        turns: Mapping[CallRef, float] | None = None,
    ) -> None:
        """Add the rows of a rollout, or with a `reason` exclude them in the ledger. `turns`: the advantages of its
        calls, which are added to its own."""
        for sample in record.samples:
            if reason is not None:
                ledger.exclude(sample, reason)
                continue
            self.samples.append(sample)
            of_calls = None if turns is None else [advantage + turns.get(ref, 0.0) for ref in sample.call_refs()]
            self.advantages.append(advantage if of_calls is None else of_calls)

    @property
    def seams(self) -> dict[str, int]:
        """Number of rows of all rollouts that each cause began."""
        counts: Counter[str] = Counter()
        for record in self.records:
            counts.update({str(cause): number for cause, number in record.seams.items()})
        return dict(counts)

    @property
    def excluded_rollouts(self) -> dict[str, int]:
        """Number of rollouts that each reason excludes from training."""
        return dict(Counter(str(record.verdict) for record in self.records if record.verdict is not None).most_common())

    def ages(self, weight_version: int) -> list[int]:
        """Return the age of the weights of each trained call, in versions before the start of the update."""
        return [weight_version - version for sample in self.samples for version in sample.weight_versions]

    @property
    def mean_reward(self) -> float | None:
        """Mean over the rollouts with a usable reward, excluding replaced groups; None without rewards."""
        return math.fsum(self.kept_rewards) / len(self.kept_rewards) if self.kept_rewards else None

    def figures(self, weight_version: int) -> dict[str, Any]:
        """Return metrics of the rollouts, under their names in `StepFigures`; `weight_version` as in `ages`."""
        calls = [call for record in self.records for call in record.calls if call.completion_token_ids]
        ages = self.ages(weight_version)
        return {
            "mean_reward": self.mean_reward,
            "reward_error": self.reward_error,
            "reward_spread": stdev(self.kept_rewards) if len(self.kept_rewards) > 1 else None,
            "seams": self.seams,
            "rollouts_excluded": self.excluded_rollouts,
            "groups": self.group_counts,
            "completion_tokens": sum(len(call.completion_token_ids) for call in calls) / len(calls) if calls else None,
            "cut_share": sum(call.finish_reason == "length" for call in calls) / len(calls) if calls else None,
            "versions_behind": sum(ages) / len(ages) if ages else None,
        }

    def enter(self, ledger: Ledger, *, trained: Callable[[Sample], bool]) -> None:
        """Record the rows in the ledger: as trained, or as excluded if there was no update."""
        for row, (sample, advantage) in enumerate(zip(self.samples, self.advantages, strict=True)):
            if trained(sample):
                ledger.train(sample, row=row, advantage=advantage)
            else:
                ledger.exclude(sample, "step_skipped")


def read_records(
    collected: Sequence[Evidence],
    adapter: TraceToTripletBase,
    *,
    decode: Decode | None = None,
    train_refused: bool = False,
    policies: Collection[str] | None = None,
    max_rows: int | None = None,
    credit: bool = False,
) -> list[RolloutRecord]:
    """Return the record of each rollout for a step. `decode` converts token ids to text, for the tokens where rows
    split. `train_refused`, `policies`, `max_rows`, `credit`: see `read_rollout`."""
    how: dict[str, Any] = {
        "decode": decode,
        "train_refused": train_refused,
        "policies": policies,
        "max_rows": max_rows,
        "credit": credit,
    }
    return [read_rollout(one.rollout, one.attempts, one.spans, adapter, **how) for one in collected]


def _standard_error(rewards: Sequence[tuple[float, int]]) -> float | None:
    """Return the standard error of the mean: that of the groups' means, and at least that of the single rollouts."""
    groups: dict[int, list[float]] = {}
    for reward, group in rewards:
        groups.setdefault(group, []).append(reward)
    drawn = [[reward for reward, _ in rewards], [fmean(group) for group in groups.values()]]
    return max((stdev(values) / len(values) ** 0.5 for values in drawn if len(values) > 1), default=None)


def choose_rows(
    records: Sequence[RolloutRecord],
    groups: Sequence[int],
    ledger: Ledger,
    settings: TrainingSettings,
    *,
    replaced: Collection[int] = (),
    kl: Mapping[str, float] | None = None,
) -> StepRows:
    """Record the excluded calls of every rollout in the ledger, and return the remaining rows.

    Shapes: records: (N,) rollouts, groups: (N,) the group of each.

    Args:
        replaced: groups that were replaced by others; they count neither in the mean of the loss nor in reward
            statistics.
        kl: the divergence of each rollout from the reference, by rollout id, for `use_kl_in_reward`.

    Raises:
        BadRequestError: no rollout with a reward has a dimension that `reward_weights` names.
    """
    for record in records:
        ledger.add(record)
    scored = _scored(records, groups)
    usable = _usable(scored, settings)
    reasons = _groups_without_signal(usable, settings)
    earned = [(record.reward, group) for record, group in scored if record.reward is not None]
    counted = [(reward, group) for reward, group in earned if group not in replaced]
    rows = StepRows(
        rewards=[reward for reward, _ in earned],
        kept_rewards=[reward for reward, _ in counted],
        reward_error=_standard_error(counted),
        records=list(records),
        groups=list(groups),
        group_counts={
            "compared": len({group for _, group in usable}),
            "equal_rewards": list(reasons.values()).count("equal_rewards"),
        },
    )
    advantages = _advantages([pair for pair in usable if pair[1] not in replaced], settings, kl or {})
    turns = _turn_advantages([pair for pair in usable if pair[1] not in replaced], settings)
    for record, group in usable:
        over_length, reason = is_over_length(record, settings), reasons.get(group)
        advantage = advantages.get(record.rollout_id, 0.0)
        why = "over_length" if reason is None and over_length else reason
        rows.add(record, advantage, ledger, why, turns if settings.rewards.turn_advantage_weight else None)
        if reason is not None and group not in replaced and not over_length:
            rows.without_signal += record.samples
    compared = {record.rollout_id for record, _ in usable}
    for record, _ in scored:
        if record.rollout_id not in compared:
            rows.add(record, 0.0, ledger, "no_reward")
    return rows


def _counted_by(aggregation: Aggregation, rows: Iterable[Sample]) -> int:
    """Return the weight of rows in a mean: their number of trained tokens, rows, or rollouts."""
    if aggregation == "token":
        return sum(sum(sample.mask) for sample in rows)
    ids = [sample.rollout_id for sample in rows]
    return len(ids) if aggregation == "sequence" else len(set(ids))


def groups_of_equal_rewards(
    records: Sequence[RolloutRecord], groups: Sequence[int], settings: TrainingSettings
) -> list[int]:
    """Return the groups whose rewards are all equal, in order."""
    reasons = _groups_without_signal(_usable(_scored(records, groups), settings), settings)
    return [group for group, reason in reasons.items() if reason == "equal_rewards"]


def _scored(records: Sequence[RolloutRecord], groups: Sequence[int]) -> list[tuple[RolloutRecord, int]]:
    pairs = zip(records, groups, strict=True)
    return [(record, group) for record, group in pairs if record.verdict is None and record.reward is not None]


def _usable(scored: Sequence[tuple[RolloutRecord, int]], settings: TrainingSettings) -> list[tuple[RolloutRecord, int]]:
    """Return the rollouts with rows and with every weighted reward dimension."""
    names = settings.rewards.reward_weights or {}
    usable = [(record, group) for record, group in scored if record.samples]
    having = [(record, group) for record, group in usable if names.keys() <= record.dimensions.keys()]
    if usable and not having:
        record = usable[0][0]
        raise BadRequestError(
            f"reward_weights names the reward dimensions {sorted(names)}; rollout {record.rollout_id} has "
            f"{sorted(record.dimensions) or 'one reward without a name'}, and no rollout of the step has all of them. "
            "Declare them with Trainer(reward_dimensions=[...]), or emit them with emit_reward({...}, primary_key=...)"
        )
    return having


def _reward(record: RolloutRecord, settings: TrainingSettings) -> float:
    """Return the reward for comparison, before the KL penalty."""
    assert record.reward is not None, record.rollout_id
    rewards, weights = settings.rewards, settings.rewards.reward_weights
    reward = record.reward if weights is None else weighted_reward(record.dimensions, weights)
    if rewards.soft_punish_cache is not None:
        longest = max(len(call.completion_token_ids) for call in _trained_calls(record))
        penalty = overlong_penalty(longest, settings.max_completion_length, rewards.soft_punish_cache)
        reward += rewards.overlong_penalty_factor * penalty
    return reward


def _trained_calls(record: RolloutRecord) -> list[ModelCall]:
    in_rows = {ref for sample in record.samples for ref in sample.call_refs()}
    return [call for call in record.calls if call.ref in in_rows]


def is_over_length(record: RolloutRecord, settings: TrainingSettings) -> bool:
    """Return whether a rollout is excluded because a call in its rows was truncated at its token limit."""
    cut = (call.finish_reason == "length" for call in _trained_calls(record))
    return settings.mask_truncated_completions and any(cut)


def _advantages(
    usable: Sequence[tuple[RolloutRecord, int]], settings: TrainingSettings, kl: Mapping[str, float]
) -> dict[str, float]:
    """Return the advantage of each rollout by its id."""
    records, groups = [record for record, _ in usable], [group for _, group in usable]
    if settings.critic is not None:  # it computes the advantages of tokens from these rewards
        return {record.rollout_id: _reward(record, settings) for record in records}
    kind = settings.rewards
    if kind.multi_objective_aggregation == "normalize_then_sum":
        assert kind.reward_weights is not None
        advantages = several_advantages([record.dimensions for record in records], kind.reward_weights, groups)
    else:
        beta = settings.loss_settings.beta
        rewards = [_reward(record, settings) - beta * kl.get(record.rollout_id, 0.0) for record in records]
        tokens = [sum(sum(sample.mask) for sample in record.samples) for record in records]
        advantages = rollout_advantages(
            rewards, groups, advantage=kind.advantage, scale_rewards=kind.scales_by, tokens=tokens
        )
    return {record.rollout_id: value for record, value in zip(records, advantages, strict=True)}


def _turn_advantages(usable: Sequence[tuple[RolloutRecord, int]], settings: TrainingSettings) -> dict[CallRef, float]:
    """Return the weighted advantage of each call in a row; nothing without `turn_advantage_weight`.

    Calls without a row are not compared, but their rewards are in the returns of earlier calls.
    """
    kind = settings.rewards
    if not kind.turn_advantage_weight:
        return {}
    emitting = {group for record, group in usable if record.call_rewards}
    refs: list[CallRef] = []
    rewards, keys = list[list[float]](), list[list[Hashable]]()
    for record, group in usable:
        trained = {call.ref for call in _trained_calls(record)}
        calls = [call for call in record.calls if call.ref in trained or call.ref in record.call_rewards]
        calls.sort(key=lambda call: call.sequence_id)
        refs += [call.ref for call in calls]
        of_calls = [record.call_rewards.get(call.ref, 0.0) for call in calls]
        if group not in emitting:
            of_calls[-1] = _reward(record, settings)
        rewards.append(of_calls)
        seen: Counter[str | None] = Counter()
        keys.append([])
        for call in calls:
            seen[call.agent] += call.ref in trained
            state = tuple(call.prompt_token_ids) if kind.turn_group == "state" else seen[call.agent]
            keys[-1].append((group, call.agent, state) if call.ref in trained else None)
    advantages = turn_advantages(
        rewards, keys, gamma=kind.turn_gamma, advantage=kind.advantage, scale_rewards=kind.scales_by
    )
    pairs = zip(refs, (value for own in advantages for value in own), strict=True)
    return {ref: kind.turn_advantage_weight * value for ref, value in pairs}


def _groups_without_signal(
    usable: Sequence[tuple[RolloutRecord, int]], settings: TrainingSettings
) -> dict[int, ExclusionReason]:
    """Return the groups without anything to learn, and the reasons. A divergence from the reference does not count:
    after scaling it would weigh as much as any reward."""
    if settings.critic is not None:
        return {}
    dimensions = None
    if settings.rewards.multi_objective_aggregation == "normalize_then_sum":
        dimensions = list(settings.rewards.reward_weights or {})
    members: dict[int, list[object]] = {}
    turns = _turn_advantages(usable, settings)
    differing = {group for record, group in usable if any(turns.get(c.ref, 0.0) for c in _trained_calls(record))}
    for record, group in usable:
        reward = _reward(record, settings) if dimensions is None else tuple(record.dimensions[d] for d in dimensions)
        members.setdefault(group if settings.rewards.compares_in_groups else 0, []).append(reward)
    reasons: dict[int, ExclusionReason] = {
        group: "no_group" if len(rewards) < 2 else "equal_rewards"
        for group, rewards in members.items()
        if len(set(rewards)) == 1 and group not in differing
    }
    if settings.rewards.compares_in_groups or not reasons:
        return reasons
    return dict.fromkeys((group for _, group in usable), reasons[0])  # the whole step was compared, as group 0


class LateCalls:
    """Records model calls that end after their step has closed, of abandoned attempts or without a waiting agent.

    The step that detects such a call excludes it as `unfinished`. `in_hand` is the number of pending calls of the
    gateway before the evidence was read.
    """

    def __init__(self) -> None:
        self._watched: list[tuple[Rollout, set[CallRef], float]] = []  # with the counted calls, and since when

    def state(self) -> list[object]:
        """Return the rollouts that may still receive calls, with the counted calls, as JSON data."""
        return [[rollout.rollout_id, sorted(map(list, counted))] for rollout, counted, _ in self._watched]

    def expect(self, collected: Sequence[Evidence], *, in_hand: int) -> None:
        """Watch the rollouts of a step that may still receive calls, with the calls that the step has counted."""
        self._watched += [
            (one.rollout, {call.ref for call in model_calls(one.spans)}, time.monotonic())
            for one in collected
            if in_hand or _was_given_up(one)
        ]

    async def enter(self, store: LightningStore, ledger: Ledger, *, in_hand: int) -> None:
        """Record the calls that arrived since, and stop watching rollouts that cannot receive more."""
        for rollout, counted, _ in self._watched:
            spans = (await evidence(store, rollout)).spans
            late = [call for call in model_calls(spans) if call.ref not in counted]
            ledger.capture(late)
            ledger.exclude([call.ref for call in late], "unfinished")
            counted.update(call.ref for call in late)
        if not in_hand:
            end = time.monotonic() - 2 * LOOKUP_SECONDS  # by then the gateway refuses the agents' further calls
            self._watched = [watched for watched in self._watched if watched[-1] > end]


def _was_given_up(rollout: Evidence) -> bool:
    latest = rollout.latest
    return len(rollout.attempts) > 1 or (latest is not None and latest.status not in ("succeeded", "failed"))
