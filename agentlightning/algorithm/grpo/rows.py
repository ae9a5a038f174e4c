"""Chooses the token rows that one step trains, each with its advantage, and enters all others into the ledger.

A group is the rollouts of one task. Rollouts without a usable reward leave their group, and so do those without a call
that can be trained: advantages compare what is trained with what is trained. A group of fewer than two, or one whose
rewards are all equal, teaches nothing and is excluded with that reason; one that loses all its members has no rows, and
the step goes on without it. The loss stays a mean over all usable rows of the step, those included: without them a step
that has little left to learn would move the weights as far as the first one.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentlightning.adapter import TraceToTripletBase
from agentlightning.adapter.calls.calls import CallRef, model_calls
from agentlightning.adapter.rows.drift import Decode
from agentlightning.adapter.rows.samples import Sample
from agentlightning.algorithm.collect import Evidence, evidence
from agentlightning.algorithm.grpo.losses.advantages import ScaleRewards, group_advantages
from agentlightning.algorithm.grpo.losses.loss_settings import Aggregation
from agentlightning.algorithm.ledger.ledger import ExclusionReason, Ledger, RolloutRecord, read_rollout
from agentlightning.llm_proxy.access.admission import LOOKUP_SECONDS
from agentlightning.store.base import LightningStore
from agentlightning.types import Rollout


@dataclass
class StepRows:
    """The rows of one step: `samples` (B,) and `advantages` (B,), and what was seen on the way."""

    samples: list[Sample] = field(default_factory=list[Sample])
    advantages: list[float] = field(default_factory=list[float])
    rewards: list[float] = field(default_factory=list[float])
    """Of every rollout with a usable reward, trained or not."""
    seams: dict[str, int] = field(default_factory=dict[str, int])
    idle_tokens: int = 0
    """Trainable tokens of the rows that were left out because their group teaches nothing."""
    idle_rows: int = 0
    idle_rollouts: int = 0
    records: list[RolloutRecord] = field(default_factory=list[RolloutRecord])
    """Every rollout as it was read, in their order."""
    groups: list[int] = field(default_factory=list[int])
    """The group of each of them."""

    def share(self, aggregation: Aggregation) -> float:
        """Return the weight that the rows have in the step's mean, between 0 and 1."""
        if aggregation == "token":
            count, idle = sum(sum(sample.mask) for sample in self.samples), self.idle_tokens
        elif aggregation == "sequence":
            count, idle = len(self.samples), self.idle_rows
        else:
            count, idle = len({sample.rollout_id for sample in self.samples}), self.idle_rollouts
        return count / (count + idle) if count else 0.0

    @property
    def excluded_rollouts(self) -> dict[str, int]:
        """How many rollouts each reason keeps from being trained."""
        return dict(Counter(str(record.verdict) for record in self.records if record.verdict is not None).most_common())

    @property
    def mean_reward(self) -> float | None:
        """Mean over the rollouts with a usable reward; None without any."""
        return math.fsum(self.rewards) / len(self.rewards) if self.rewards else None

    def enter(self, ledger: Ledger, *, trained: bool) -> None:
        """Enter what became of the rows: they were trained, or the update did not take place."""
        for row, (sample, advantage) in enumerate(zip(self.samples, self.advantages, strict=True)):
            if trained:
                ledger.train(sample, row=row, advantage=advantage)
            else:
                ledger.exclude(sample, "step_skipped")


def choose_rows(
    found: Sequence[Evidence],
    groups: Sequence[int],
    adapter: TraceToTripletBase,
    ledger: Ledger,
    *,
    scale_rewards: ScaleRewards = "group",
    decode: Decode | None = None,
    train_refused: bool = False,
) -> StepRows:
    """Read every rollout, enter its excluded calls into the ledger, and return the rows that are left.

    Shapes: found: (N,) rollouts, groups: (N,) the group of each. `decode` turns token ids into their text: it is asked
    where rows part. `train_refused`: see `read_rollout`.
    """
    records = [
        read_rollout(one.rollout, one.attempts, one.spans, adapter, decode=decode, train_refused=train_refused)
        for one in found
    ]
    for record in records:
        ledger.add(record)
    scored = [(r, g) for r, g in zip(records, groups, strict=True) if r.verdict is None and r.reward is not None]
    usable = [(record, group) for record, group in scored if record.samples]
    rewards = [record.reward for record, _ in usable if record.reward is not None]
    advantages = group_advantages(rewards, [group for _, group in usable], scale_rewards=scale_rewards)
    reasons = _teaches_nothing(rewards, [group for _, group in usable])
    earned = [record.reward for record, _ in scored if record.reward is not None]
    rows = StepRows(rewards=earned, seams=_seams(records), records=records, groups=list(groups))
    for (record, group), advantage in zip(usable, advantages, strict=True):
        rows.idle_rollouts += group in reasons and bool(record.samples)
        for sample in record.samples:
            if group in reasons:
                ledger.exclude(sample, reasons[group])
                rows.idle_tokens += sum(sample.mask)
                rows.idle_rows += 1
            else:
                rows.samples.append(sample)
                rows.advantages.append(advantage)
    return rows


def _teaches_nothing(rewards: Sequence[float], groups: Sequence[int]) -> dict[int, ExclusionReason]:
    """Return the groups from which nothing is to be learned, and why."""
    members: dict[int, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        members.setdefault(group, []).append(reward)
    reasons: dict[int, ExclusionReason] = {}
    for group, values in members.items():
        if len(values) < 2:
            reasons[group] = "no_group"
        elif min(values) == max(values):
            reasons[group] = "equal_rewards"
    return reasons


def _seams(records: Sequence[RolloutRecord]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for record in records:
        counts.update({str(cause): number for cause, number in record.seams.items()})
    return dict(counts)


def why_failed(found: Sequence[Evidence]) -> str:
    """Return the commonest way in which the rollouts ended, in words."""
    ways = Counter(_way_of(one) for one in found)
    [(way, number)] = ways.most_common(1)
    return f"{way} ({number} of {len(found)})"


def _way_of(found: Evidence) -> str:
    latest = found.latest
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

    def expect(self, found: Sequence[Evidence], *, in_hand: int) -> None:
        """Remember the rollouts of a step that may still come to have calls, and those that the step has counted."""
        self._watched += [
            _Watched(one.rollout, {call.ref for call in model_calls(one.spans)}, time.monotonic())
            for one in found
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


def _was_given_up(found: Evidence) -> bool:
    latest = found.latest
    return len(found.attempts) > 1 or (latest is not None and latest.status not in ("succeeded", "failed"))
