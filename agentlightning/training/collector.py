"""Collects the rollouts of each training step: runs and reads them, replaces groups with equal rewards, creates rows.

When the collection of a step begins, groups are started until `max_staleness + 1` times `batch_size` are in progress.
The step uses `batch_size` of the groups that have ended, in the order of the plan. The other groups continue while the
weights change (asynchronous rollouts, AReaL, arXiv:2505.24298), for up to `max_staleness` updates if groups end in
order. A slower group, with a reply from older weights, is dropped when it ends, and another group is started to replace
it. With `max_staleness=0` a step collects its own groups and nothing is in progress between steps.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning.adapter.calls.calls import CallRef
from agentlightning.adapter.rows.samples import UNKNOWN_WEIGHTS, SampleReading
from agentlightning.base.terminal import counted
from agentlightning.training.context import TrainingContext
from agentlightning.training.group_rewards import store_group_rewards, with_group_rewards
from agentlightning.training.ledger import ExclusionReason, Ledger, RolloutRecord
from agentlightning.training.rollouts import Evidence, Watcher, collect, evidence
from agentlightning.training.rows import LateCalls, StepRows, choose_rows, groups_of_equal_rewards, read_records
from agentlightning.training.run_checks import Endings, why_failed
from agentlightning.training.tasks import Curriculum, GroupKey, GroupPlan, OpenGroups, key_of, metadata_of
from agentlightning.types import EnqueueRolloutRequest, Rollout


@dataclass
class Group:
    """A finished group: (N,) rollouts each, in the same order."""

    key: GroupKey
    evidence: list[Evidence]
    records: list[RolloutRecord]
    calls_in_hand: int
    """Number of pending gateway calls before the group was read, excluding those of groups in progress."""
    waited_seconds: float

    @property
    def rewards(self) -> list[float]:
        """The rewards of the usable rollouts."""
        return [one.reward for one in self.records if one.verdict is None and one.reward is not None]


@dataclass
class ReadRollouts:
    """The finished rollouts of a step: (N,) each, in the same order."""

    evidence: list[Evidence] = field(default_factory=list[Evidence])
    records: list[RolloutRecord] = field(default_factory=list[RolloutRecord])
    groups: list[int] = field(default_factory=list[int])
    """The group of each rollout; -1 for a rollout that was requeued."""

    @classmethod
    def of(cls, groups: Sequence[Group], size: int) -> ReadRollouts:
        """Return the rollouts of groups, `size` of each; those that replaced late ones come last."""
        read = cls()
        members = [(number, group, slice(size)) for number, group in enumerate(groups)]
        for number, group, part in [*members, *((-1, group, slice(size, None)) for group in groups)]:
            read.evidence += group.evidence[part]
            read.records += group.records[part]
            read.groups += [number] * len(group.evidence[part])
        return read

    @property
    def rollouts(self) -> list[Rollout]:
        return [one.rollout for one in self.evidence]


class StepCollector:
    """Collects the rollouts of each step. Belongs to the loop of the run."""

    def __init__(self, context: TrainingContext, tasks: list[object]) -> None:
        self._context, settings = context, context.settings
        self._tasks = tasks
        self.endings = Endings()
        """The outcomes of all rollouts of the run."""
        self.late = LateCalls()
        """The calls that may end after their step."""
        self.figures: dict[str, Any] = {}
        """Metrics of the last step, see `StepFigures.flight`. Empty without `max_staleness`."""
        self.curriculum = (
            Curriculum(len(tasks), settings.seed, settings.solved_above) if settings.draws_by_solve_rate else None
        )
        self.curriculum_figures: dict[str, float] = {}
        """Metrics of the last step, see `StepFigures.curriculum`."""
        self._plan = GroupPlan(
            tasks,
            settings.batch_size,
            settings.seed,
            shuffle=settings.shuffle_dataset,
            curriculum=self.curriculum,
        )
        self._plan.next = (context.resume.steps + 1, 0)
        self._running: dict[GroupKey, asyncio.Task[list[Rollout]]] = {}
        self._enqueued: dict[GroupKey, set[str]] = {}
        self._interrupted: list[GroupKey] = []  # in progress when an earlier start ended, in their order
        self._replacements: dict[GroupKey, int] = {}
        self._last_end = time.monotonic()

    # --- between two steps -------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """Return the state for `restore`, as JSON data; None if nothing is in progress between steps."""
        if not self._context.settings.most_stale:
            return None
        return {"next": list(self._plan.next), "open": [list(key) for key in [*self._keys(), *self._interrupted]]}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restore the state of an earlier start of the run."""
        if state is not None:  # None: nothing was in progress
            groups = OpenGroups(state)
            self._plan.next, self._interrupted = groups.next, groups.keys

    @property
    def in_progress(self) -> set[str]:
        """The ids of the rollouts of groups that no step has taken yet, finished or not."""
        return {rollout_id for ids in self._enqueued.values() for rollout_id in ids}

    def is_to_come(self, rollout: Rollout) -> bool:
        """Return whether a later step will use this rollout of an earlier start."""
        key = key_of(rollout.metadata or {})
        is_planned = key.place >= self._plan.next and key.take == self._context.resume.take
        return key in self._interrupted or key in self._running or is_planned

    async def wait_for_all(self) -> None:
        """Wait until every group in progress has ended; later steps use them."""
        if self._running:
            await asyncio.wait(self._running.values())

    async def close(self) -> None:
        """Cancel every group in progress with its rollouts, and wait until that is done."""
        running, self._running, self._enqueued = list(self._running.values()), {}, {}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _keys(self) -> list[GroupKey]:
        """Return the groups that no step has taken yet, finished or not, in the planned order."""
        return sorted(self._running, key=lambda key: (key.place, key.take or ""))

    # --- a step ------------------------------------------------------------------------------------------------------

    async def collect(self, step: int, resources_id: str, ledger: Ledger) -> tuple[list[Rollout], StepRows]:
        """Return the rollouts of a step's groups, and the rows to train on."""
        context, settings = self._context, self._context.settings
        version = context.updater.weight_version
        self._replacements = {}
        self._start_groups(step, resources_id)
        in_progress = len(self._running)
        selected, dropped = await self._ended_groups(step, resources_id, version)
        await self._judge(selected)
        replaced: set[int] = set()
        for batch in range(1, settings.rewards.max_num_gen_batches):
            read = ReadRollouts.of(selected, settings.num_generations)
            equal = [g for g in groups_of_equal_rewards(read.records, read.groups, settings) if g not in replaced]
            keys = self._start_replacements(step, len(equal), batch, resources_id)
            if not keys:
                break
            replaced.update(equal[: len(keys)])
            context.note(f"step {step}: {counted(len(keys), 'group')} with equal rewards replaced by others")
            others = {key: await self._next_group([key]) for key in keys}
            await self._judge(list(others.values()))
            selected += others.values()
        if self.curriculum is not None:
            self.curriculum_figures = self.curriculum.add([(self._task_of(one.key), one.rewards) for one in selected])
        groups = [*selected, *dropped]
        read = ReadRollouts.of(groups, settings.num_generations)
        rows = await self._choose(read, ledger, replaced)
        self._watch(step, read.evidence, rows, max((group.calls_in_hand for group in groups), default=0))
        if settings.most_stale:
            ages = rows.ages(version)
            self.figures = {
                "in_flight": in_progress,
                "waited_seconds": sum(group.waited_seconds for group in groups),
                **({"mean_staleness": sum(ages) / len(ages), "max_staleness": max(ages)} if ages else {}),
                "dropped_groups": len(dropped),
                "taken": [list(group.key) for group in selected],
                "dropped": [list(group.key) for group in dropped],
            }
        return read.rollouts, rows

    async def _ended_groups(self, step: int, resources_id: str, version: int) -> tuple[list[Group], list[Group]]:
        """Return the groups that the step takes, and those that are too old for it, in the planned order."""
        context, settings = self._context, self._context.settings
        recorded = context.resume.recorded.get(step, {}).get("flight") or {}
        # a step that an earlier start completed takes and drops the same groups
        recorded_keys = {GroupKey(*key) for name in ("taken", "dropped") for key in recorded.get(name, ())}
        selected, dropped = dict[GroupKey, Group](), dict[GroupKey, Group]()
        while len(selected) < self._plan.size:
            group = await self._next_group(recorded_keys - selected.keys() - dropped.keys())
            age = age_of_group(group.records, version) if settings.most_stale else None
            if age is not None and age > settings.most_stale:
                unjudged = context.group_reward is not None
                group.records = [dropped_record(record, unjudged=unjudged) for record in group.records]
                dropped[group.key] = group
                self._start_groups(step, resources_id, selected=len(selected))
                continue
            selected[group.key] = group
            size = settings.num_generations
            context.progress.rollouts(len(selected) * size, self._plan.size * size, f"step {step}")
        if dropped:
            groups = counted(len(dropped), "group")
            context.note(f"step {step}: {groups} dropped, older than max_staleness={settings.most_stale}")

        def in_order(groups: dict[GroupKey, Group]) -> list[Group]:
            return sorted(groups.values(), key=lambda group: group.key.place)

        return in_order(selected), in_order(dropped)

    async def _next_group(self, among: Collection[GroupKey]) -> Group:
        """Return the next group that has ended, or the first in the plan if there are several; one of `among`, if any
        of these is in progress. Raise the error of the group, such as one of the store."""
        began = time.monotonic()
        keys = [key for key in self._keys() if key in among] or self._keys()
        await asyncio.wait([self._running[key] for key in keys], return_when=asyncio.FIRST_COMPLETED)
        key = next(key for key in keys if self._running[key].done())
        rollouts = self._running.pop(key).result()
        self._enqueued.pop(key)
        waited = time.monotonic() - began
        in_hand = self._context.proxy.calls_in_hand(outside=self.in_progress)
        ended = [await evidence(self._context.store, rollout, note=True) for rollout in rollouts]
        return Group(key, ended, self._records(ended), in_hand, waited)

    def _start_groups(self, step: int, resources_id: str, *, selected: int = 0) -> None:
        """Start groups up to the limit of groups in progress, and no more than the run will train."""
        settings = self._context.settings
        remaining = (settings.max_steps - step + 1) * self._plan.size - selected
        most = (settings.most_stale + 1) * self._plan.size - selected
        take = self._context.resume.take_of(step)
        while len(self._running) < min(remaining, most):
            self._start(self._interrupted.pop(0) if self._interrupted else self._plan.draw(take), resources_id)

    def _start_replacements(self, step: int, count: int, batch: int, resources_id: str) -> list[GroupKey]:
        """Start up to `count` groups of tasks that are not in the step yet, the same ones for the same seed."""
        before = [*self._plan.indices_of(step), *self._replacements.values()]
        tasks = self._plan.others(step, batch, before, count)
        take = self._context.resume.take_of(step)
        keys = [GroupKey(step, number, take) for number in range(len(before), len(before) + len(tasks))]
        self._replacements.update(zip(keys, tasks, strict=True))
        for key in keys:
            self._start(key, resources_id)
        return keys

    def _start(self, key: GroupKey, resources_id: str) -> None:
        self._enqueued[key] = set()
        self._running[key] = asyncio.ensure_future(self._run_group(key, resources_id))

    def _task_of(self, key: GroupKey) -> int:
        """Return the index of the task of a group."""
        return self._replacements[key] if key in self._replacements else self._plan.indices_of(key.step)[key.task]

    async def _run_group(self, key: GroupKey, resources_id: str) -> list[Rollout]:
        """Run the rollouts of a group. Its time limit is that of all steps during which it may be in progress."""
        context, settings = self._context, self._context.settings
        task = self._tasks[self._task_of(key)]
        looks = not (context.guard.has_looked or context.group_reward) and key.step == context.step
        patient = settings.late_rollouts == "wait"

        async def on_ended(ended: Sequence[Rollout]) -> None:
            self._last_end = time.monotonic()
            for rollout in ended if looks else ():
                if not context.guard.has_looked:
                    self._look_at([await evidence(context.store, rollout)])

        return await collect(
            context.store,
            [
                EnqueueRolloutRequest(
                    input=task,
                    mode="train",
                    resources_id=resources_id,
                    config=context.limits(),
                    metadata=metadata_of(key.step, key.task, sample, key.take),
                )
                for sample in range(settings.num_generations)
            ],
            timeout_seconds=settings.step_timeout_seconds * (settings.most_stale + 1),
            late=settings.late_rollouts,
            watcher=Watcher(
                on_enqueued=lambda rollouts: self._enqueued[key].update(rollout.rollout_id for rollout in rollouts),
                on_ended=on_ended if looks or patient else None,
                last_end=lambda: self._last_end,
            ),
        )

    # --- what ended is read ------------------------------------------------------------------------------------------

    async def _judge(self, groups: Sequence[Group]) -> None:
        """Set the rewards of groups to those of `group_reward`, if the run has one."""
        context = self._context
        if context.group_reward is None:
            return
        read = ReadRollouts.of(groups, context.settings.num_generations)
        judged, questions = await with_group_rewards(
            context.group_reward, read.evidence, read.groups, lambda text: context.alarm(text, "not_judged")
        )
        await store_group_rewards(context.store, judged, questions)
        self._look_at(judged)
        by_id = {each.rollout.rollout_id: each for each in judged}
        for group in groups:
            group.evidence = [by_id[one.rollout.rollout_id] for one in group.evidence]
            group.records = self._records(group.evidence)

    def _records(self, ended: Sequence[Evidence]) -> list[RolloutRecord]:
        """Return the record of each rollout for a step."""
        return read_records(
            ended,
            self._context.adapter,
            decode=self._context.guard.decode,
            train_refused=self._context.settings.refused_calls == "train",
            policies=self._context.updater.names,
            credit=bool(self._context.settings.rewards.turn_advantage_weight),
            max_rows=self._context.settings.max_rows_per_rollout,
        )

    async def _choose(self, read: ReadRollouts, ledger: Ledger, replaced: Collection[int]) -> StepRows:
        """Return the rows of a step, without those of `replaced` groups; enter the other calls into the ledger."""
        settings = self._context.settings
        kl = await self._divergences(read.records) if settings.penalizes_rollouts else None
        return choose_rows(read.records, read.groups, ledger, settings, replaced=replaced, kl=kl)

    async def _divergences(self, records: Sequence[RolloutRecord]) -> dict[str, float]:
        """Return the divergence of each rollout from the reference, in nats."""
        updater, seconds = self._context.updater, self._context.settings.step_timeout_seconds
        samples = [sample for record in records for sample in record.samples]
        if not samples:
            return {}

        def compute() -> list[float]:
            with updater.paused(seconds):
                return updater.divergences(samples)

        sums: dict[str, float] = {}
        for sample, value in zip(samples, await asyncio.to_thread(compute), strict=True):
            sums[sample.rollout_id] = sums.get(sample.rollout_id, 0.0) + value
        return sums

    def _watch(self, step: int, ended: Sequence[Evidence], rows: StepRows, calls_in_hand: int) -> None:
        """Report problems of a step's rollouts."""
        context = self._context
        self.endings.add(ended, rows)
        self.late.expect(ended, in_hand=calls_in_hand)
        context.guard.count_drift(rows.records)
        if (report := context.guard.untrainable(rows.records)) is not None:
            context.alarm(f"step {step}: {report}", "untrainable")
        if (report := context.guard.refusals(rows.records)) is not None:
            context.alarm(f"step {step}: {report}", "refused_calls")
        if (report := context.guard.over_row_limit(rows.records)) is not None:
            context.alarm(f"step {step}: {report}", "row_limit")
        if not rows.rewards:
            text = f"step {step}: none of {counted(len(ended), 'rollout')} has a reward to learn from; most often: "
            context.alarm(text + why_failed(ended), "no_reward")

    def _look_at(self, ended: Sequence[Evidence]) -> None:
        """Report if the first rollout with a reward has no call through the gateway."""
        for one in ended:
            if (report := self._context.guard.first_look(one)) is not None:
                self._context.alarm(report, "first_rollout")


def age_of_group(records: Sequence[RolloutRecord], weight_version: int) -> int | None:
    """Return the age, in weight versions, of the oldest reply of the counted attempts; None if no reply has known
    tokens. A reply without a recorded weight version counts as the oldest."""

    def may_be_trained(record: RolloutRecord, call: CallRef) -> bool:  # in rows, or waiting for its group's reward
        return record.exclusions.get(call, "no_reward") == "no_reward"

    ages = [
        weight_version - (UNKNOWN_WEIGHTS if call.weight_version is None else call.weight_version)
        for record in records
        for call in record.calls
        if call.completion_token_ids and call.ref.attempt_id == record.attempt_id and may_be_trained(record, call.ref)
    ]
    return max(ages, default=None)


def dropped_record(record: RolloutRecord, *, unjudged: bool) -> RolloutRecord:
    """Return the record of a rollout whose group is too old: its trainable calls are excluded as `too_stale`.

    `unjudged`: the rollout has no reward because its group was not judged.
    """
    replaced: tuple[ExclusionReason | None, ...] = (None, "no_reward") if unjudged else (None,)
    if record.verdict not in replaced:
        return record
    exclusions = dict(record.exclusions)
    for call in record.calls:
        if call.ref not in exclusions or (unjudged and exclusions[call.ref] == "no_reward"):
            exclusions[call.ref] = "too_stale"
    return dataclasses.replace(record, verdict="too_stale", exclusions=exclusions, reading=SampleReading([], []))
