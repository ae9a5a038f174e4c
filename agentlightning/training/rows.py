"""Chooses the token rows that one step trains, each with its advantage, and enters all others into the ledger.

A group is the rollouts of one task. Rollouts without a usable reward leave their group, and so do those without a call
that can be trained: advantages compare what is trained with what is trained. A group of fewer than two, or one whose
rewards are all equal, teaches nothing and is excluded with that reason; one that loses all its members has no rows, and
the step goes on without it. The loss stays a mean over all usable rows of the step, those of such groups included:
otherwise a step that has little left to learn would move the weights as far as the first one.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
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
from agentlightning.training.losses.advantages import (
    overlong_penalty,
    rollout_advantages,
    several_advantages,
    weighted_reward,
)
from agentlightning.training.rollouts import Evidence, evidence
from agentlightning.training.settings import Aggregation, GRPOSettings
from agentlightning.types import Rollout


@dataclass
class StepRows:
    """The rows of one step: `samples` (B,) and `advantages` (B,), and what was seen on the way."""

    samples: list[Sample] = field(default_factory=list[Sample])
    advantages: list[float] = field(default_factory=list[float])
    rewards: list[float] = field(default_factory=list[float])
    """Of every rollout with a usable reward, trained or not."""
    kept_rewards: list[float] = field(default_factory=list[float])
    """Of those whose group was not replaced by another one."""
    reward_error: float | None = None
    """Standard error of `mean_reward`, tasks being what was drawn; None for less than two rollouts."""
    seams: dict[str, int] = field(default_factory=dict[str, int])
    idle: list[Sample] = field(default_factory=list[Sample])
    """Rows that were left out because their group teaches nothing; they count in the mean of the loss."""
    records: list[RolloutRecord] = field(default_factory=list[RolloutRecord])
    """Every rollout as it was read, in their order."""
    groups: list[int] = field(default_factory=list[int])
    """The group of each of them."""
    group_counts: dict[str, int] = field(default_factory=dict[str, int])
    """Groups with a usable rollout (`compared`), and those of equal rewards (`equal_rewards`)."""

    def share(self, aggregation: Aggregation, takes: Callable[[Sample], bool] = lambda _: True) -> float:
        """Return the weight that the rows have in the step's mean, between 0 and 1; `takes` says which rows count."""
        count, idle = (
            _counted_by(aggregation, [sample for sample in rows if takes(sample)]) for rows in (self.samples, self.idle)
        )
        return count / (count + idle) if count else 0.0

    @property
    def excluded_rollouts(self) -> dict[str, int]:
        """How many rollouts each reason keeps from being trained."""
        return dict(Counter(str(record.verdict) for record in self.records if record.verdict is not None).most_common())

    def reply_figures(self, weight_version: int) -> dict[str, float | None]:
        """Return figures of the replies, under their names in `StepFigures`; `weight_version` is that of the weights
        before the update."""
        calls = [call for record in self.records for call in record.calls if call.completion_token_ids]
        ages = [weight_version - version for sample in self.samples for version in sample.weight_versions]
        return {
            "completion_tokens": sum(len(call.completion_token_ids) for call in calls) / len(calls) if calls else None,
            "cut_share": sum(call.finish_reason == "length" for call in calls) / len(calls) if calls else None,
            "versions_behind": sum(ages) / len(ages) if ages else None,
        }

    @property
    def mean_reward(self) -> float | None:
        """Mean over the rollouts with a usable reward, groups left out that others replaced; None without any."""
        return math.fsum(self.kept_rewards) / len(self.kept_rewards) if self.kept_rewards else None

    @property
    def reward_spread(self) -> float | None:
        """Standard deviation of the same rewards; None for less than two."""
        return stdev(self.kept_rewards) if len(self.kept_rewards) > 1 else None

    def enter(self, ledger: Ledger, *, trained: Callable[[Sample], bool]) -> None:
        """Enter what became of the rows: they were trained, or the update did not take place."""
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
) -> list[RolloutRecord]:
    """Return what each rollout gives to a step. `decode` turns token ids into their text: it is asked where rows part.
    `train_refused`, `policies`: see `read_rollout`."""
    how: dict[str, Any] = {"decode": decode, "train_refused": train_refused, "policies": policies}
    return [read_rollout(one.rollout, one.attempts, one.spans, adapter, **how) for one in collected]


def _standard_error(rewards: Sequence[tuple[float, int]]) -> float | None:
    """Return the standard error of the mean: of the groups' means, and no less than that of the rollouts alone."""
    groups: dict[int, list[float]] = {}
    for reward, group in rewards:
        groups.setdefault(group, []).append(reward)
    drawn = [[reward for reward, _ in rewards], [fmean(group) for group in groups.values()]]
    return max((stdev(values) / len(values) ** 0.5 for values in drawn if len(values) > 1), default=None)


def choose_rows(
    records: Sequence[RolloutRecord],
    groups: Sequence[int],
    ledger: Ledger,
    settings: GRPOSettings,
    *,
    replaced: Collection[int] = (),
    kl: Mapping[str, float] | None = None,
) -> StepRows:
    """Enter the excluded calls of every rollout into the ledger, and return the rows that are left.

    Shapes: records: (N,) rollouts, groups: (N,) the group of each.

    Args:
        replaced: groups in whose place others were sampled: they count neither in the mean of the loss nor in the
            statistics of the rewards that advantages are made of.
        kl: the divergence of each rollout from the reference by rollout id, for `use_kl_in_reward`.

    Raises:
        BadRequestError: no rollout with a reward has a dimension that `reward_weights` names.
    """
    for record in records:
        ledger.add(record)
    scored = [(r, g) for r, g in zip(records, groups, strict=True) if r.verdict is None and r.reward is not None]
    usable = _usable(scored, settings)
    own, of = [record for record, _ in usable], [group for _, group in usable]
    reasons = _teach_nothing(own, of, settings)
    earned = [(record.reward, group) for record, group in scored if record.reward is not None]
    rewards, kept = [reward for reward, _ in earned], [reward for reward, group in earned if group not in replaced]
    rows = StepRows(
        rewards=rewards, kept_rewards=kept, seams=seams_of(records), records=list(records), groups=list(groups)
    )
    rows.reward_error = _standard_error([pair for pair in earned if pair[1] not in replaced])
    equal = sum(reason == "equal_rewards" for reason in reasons.values())
    rows.group_counts = {"compared": len(set(of)), "equal_rewards": equal}
    advantages = _advantages([pair for pair in usable if pair[1] not in replaced], settings, kl or {})
    for record, group in usable:
        cut = settings.mask_truncated_completions and was_cut(record)
        is_idle = group in reasons and group not in replaced and not cut
        for sample in record.samples:
            if group in reasons:
                ledger.exclude(sample, reasons[group])
                rows.idle += [sample] if is_idle else []
            elif cut:
                ledger.exclude(sample, "over_length")
            else:
                rows.samples.append(sample)
                rows.advantages.append(advantages[record.rollout_id])
    compared = {record.rollout_id for record in own}
    for record, _ in scored:
        if record.samples and record.rollout_id not in compared:
            ledger.exclude([ref for sample in record.samples for ref in sample.call_refs()], "no_reward")
    return rows


def _counted_by(aggregation: Aggregation, rows: Sequence[Sample]) -> int:
    """Return how much rows count in a mean: by their trained tokens, by rows, or by rollouts."""
    if aggregation == "token":
        return sum(sum(sample.mask) for sample in rows)
    return len(rows) if aggregation == "sequence" else len({sample.rollout_id for sample in rows})


def groups_of_equal_rewards(
    records: Sequence[RolloutRecord], groups: Sequence[int], settings: GRPOSettings
) -> list[int]:
    """Return the groups that teach nothing because all their rewards are equal, in their order."""
    scored = [(r, g) for r, g in zip(records, groups, strict=True) if r.verdict is None and r.reward is not None]
    usable = _usable(scored, settings)
    reasons = _teach_nothing([record for record, _ in usable], [group for _, group in usable], settings)
    return [group for group, reason in reasons.items() if reason == "equal_rewards"]


def _usable(scored: Sequence[tuple[RolloutRecord, int]], settings: GRPOSettings) -> list[tuple[RolloutRecord, int]]:
    """Return the rollouts with rows and with every reward dimension that counts."""
    names = settings.reward_weights or {}
    usable = [(record, group) for record, group in scored if record.samples]
    having = [(record, group) for record, group in usable if names.keys() <= record.dimensions.keys()]
    if usable and not having:
        record = usable[0][0]
        raise BadRequestError(
            f"reward_weights names the reward dimensions {sorted(names)}; rollout {record.rollout_id} has "
            f"{sorted(record.dimensions) or 'one reward without a name'}, and no other of the step has them. "
            "Declare them with Trainer(reward_dimensions=[...]), or emit them with emit_reward({...}, primary_key=...)"
        )
    return having


def _reward(record: RolloutRecord, settings: GRPOSettings) -> float:
    """Return the reward that is compared, but for a divergence."""
    assert record.reward is not None, record.rollout_id
    weights = settings.reward_weights
    reward = record.reward if weights is None else weighted_reward(record.dimensions, weights)
    if settings.soft_punish_cache is not None:
        longest = max(len(call.completion_token_ids) for call in _trained_calls(record))
        penalty = overlong_penalty(longest, settings.max_completion_length, settings.soft_punish_cache)
        reward += settings.overlong_penalty_factor * penalty
    return reward


def _trained_calls(record: RolloutRecord) -> list[ModelCall]:
    in_rows = {ref for sample in record.samples for ref in sample.call_refs()}
    return [call for call in record.calls if call.ref in in_rows]


def was_cut(record: RolloutRecord) -> bool:
    """Return whether a call in its rows was cut at its limit."""
    return any(call.finish_reason == "length" for call in _trained_calls(record))


def _advantages(
    usable: Sequence[tuple[RolloutRecord, int]], settings: GRPOSettings, kl: Mapping[str, float]
) -> dict[str, float]:
    """Return the advantage of each rollout by its id."""
    records, groups = [record for record, _ in usable], [group for _, group in usable]
    if settings.critic is not None:  # it makes the advantages of tokens out of these rewards
        return {record.rollout_id: _reward(record, settings) for record in records}
    if settings.multi_objective_aggregation == "normalize_then_sum":
        assert settings.reward_weights is not None
        advantages = several_advantages([record.dimensions for record in records], settings.reward_weights, groups)
    else:
        rewards = [_reward(record, settings) - settings.beta * kl.get(record.rollout_id, 0.0) for record in records]
        tokens = [sum(sum(sample.mask) for sample in record.samples) for record in records]
        by = settings.scales_by
        advantages = rollout_advantages(rewards, groups, advantage=settings.advantage, scale_rewards=by, tokens=tokens)
    return {record.rollout_id: value for record, value in zip(records, advantages, strict=True)}


def _teach_nothing(
    records: Sequence[RolloutRecord], groups: Sequence[int], settings: GRPOSettings
) -> dict[int, ExclusionReason]:
    """Return the groups from which nothing is to be learned, and why. A divergence from the reference does not count:
    scaled, it alone would weigh as much as any reward."""
    if settings.critic is not None:
        return {}
    members: dict[int, list[float | tuple[float, ...]]] = {}
    for record, group in zip(records, groups, strict=True):
        several = settings.multi_objective_aggregation == "normalize_then_sum"
        names = settings.reward_weights or {}
        worth = tuple(record.dimensions[name] for name in names) if several else _reward(record, settings)
        members.setdefault(group if settings.compares_in_groups else 0, []).append(worth)
    reasons: dict[int, ExclusionReason] = {}
    for group, values in members.items():
        if len(values) < 2:
            reasons[group] = "no_group"
        elif len(set(values)) == 1:
            reasons[group] = "equal_rewards"
    if settings.compares_in_groups or not reasons:
        return reasons
    return dict.fromkeys(groups, reasons[0])  # the whole step was compared, as group 0


def seams_of(records: Sequence[RolloutRecord]) -> dict[str, int]:
    """Return how many rows of all rollouts each cause began."""
    counts: Counter[str] = Counter()
    for record in records:
        counts.update({str(cause): number for cause, number in record.seams.items()})
    return dict(counts)


def why_failed(collected: Sequence[Evidence]) -> str:
    """Return the commonest way in which the rollouts ended, in words."""
    ways = Counter(_way_of(one) for one in collected)
    [(way, number)] = ways.most_common(1)
    return f"{way} ({number} of {len(collected)})"


def _way_of(rollout: Evidence) -> str:
    latest = rollout.latest
    if latest is None:
        return "nobody claimed it in time"
    error = f": {latest.error.type}: {latest.error.message}" if latest.error else ""
    return f"{latest.outcome_reason or latest.outcome or latest.status}{error}"


@dataclass
class _Watched:
    rollout: Rollout
    counted: set[CallRef]
    since: float


class LateCalls:
    """Books for model calls that end after their step has closed: those of attempts that were given up on, and those
    that an agent did not wait for.

    Such a call is excluded in the step in which it is seen, as `unfinished`. `in_hand` is always the number of calls
    that the gateway had in hand before the evidence was read.
    """

    def __init__(self) -> None:
        self._watched: list[_Watched] = []

    def state(self) -> list[object]:
        """Return the rollouts that may still come to have calls, with the calls that were counted, as JSON data."""
        return [[one.rollout.rollout_id, sorted(map(list, one.counted))] for one in self._watched]

    def expect(self, collected: Sequence[Evidence], *, in_hand: int) -> None:
        """Remember the rollouts of a step that may still come to have calls, and those that the step has counted."""
        self._watched += [
            _Watched(one.rollout, {call.ref for call in model_calls(one.spans)}, time.monotonic())
            for one in collected
            if in_hand or _was_given_up(one)
        ]

    async def enter(self, store: LightningStore, ledger: Ledger, *, in_hand: int) -> None:
        """Enter the calls that have come in since; forget rollouts that can have no more."""
        for one in self._watched:
            spans = (await evidence(store, one.rollout)).spans
            late = [call for call in model_calls(spans) if call.ref not in one.counted]
            ledger.capture(late)
            ledger.exclude([call.ref for call in late], "unfinished")
            one.counted.update(call.ref for call in late)
        if not in_hand:
            end = time.monotonic() - 2 * LOOKUP_SECONDS  # by then the gateway refuses the agents' further calls
            self._watched = [one for one in self._watched if one.since > end]


def _was_given_up(rollout: Evidence) -> bool:
    latest = rollout.latest
    return len(rollout.attempts) > 1 or (latest is not None and latest.status not in ("succeeded", "failed"))
