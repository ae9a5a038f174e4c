"""The rollouts of a training step: they are run, read, replaced where they teach nothing, and made into rows."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning.training.checkpoint.resume import metadata_of
from agentlightning.training.group_rewards import Questions, store_group_rewards, with_group_rewards
from agentlightning.training.ledger import Ledger, RolloutRecord
from agentlightning.training.parts import RunParts
from agentlightning.training.rollouts import Evidence, collect, evidence
from agentlightning.training.rows import (
    LateCalls,
    StepRows,
    choose_rows,
    groups_of_equal_rewards,
    read_records,
    why_failed,
)
from agentlightning.training.run_checks import Endings
from agentlightning.types import EnqueueRolloutRequest, Rollout


@dataclass
class ReadRollouts:
    """The rollouts of a step at their end: (N,) each, in one order."""

    rollouts: list[Rollout] = field(default_factory=list[Rollout])
    collected: list[Evidence] = field(default_factory=list[Evidence])
    records: list[RolloutRecord] = field(default_factory=list[RolloutRecord])
    groups: list[int] = field(default_factory=list[int])
    """The group of each; -1 for one that was enqueued once more."""

    def add(
        self,
        rollouts: Sequence[Rollout],
        collected: Sequence[Evidence],
        records: Sequence[RolloutRecord],
        groups: Sequence[int],
    ) -> None:
        """Take in further ones."""
        self.rollouts += rollouts
        self.collected += collected
        self.records += records
        self.groups += groups


class RolloutCollection:
    """Collects the rollouts of each step. Belongs to the loop.

    Attributes:
        endings: what became of all rollouts of the run.
        late: the calls that may end after their step.
    """

    def __init__(self, parts: RunParts, tasks: list[object]) -> None:
        self._parts = parts
        self._tasks = tasks
        self.endings = Endings()
        self.late = LateCalls()

    async def collect(
        self, step: int, tasks: Sequence[object], resources_id: str, ledger: Ledger
    ) -> tuple[list[Rollout], StepRows]:
        """Run the tasks, and others in place of those whose rewards are all equal; choose the rows to train on."""
        settings = self._parts.settings
        read = ReadRollouts()
        replaced: set[int] = set()
        seen = list(tasks)
        in_hand = 0
        for batch in range(1, settings.max_num_gen_batches + 1):
            first = len(seen) - len(tasks)
            ended = await self._run_tasks(step, tasks, resources_id, first=first)
            in_hand = max(in_hand, self._parts.proxy.stats()["in_hand"])
            collected = [await evidence(self._parts.store, rollout, note=True) for rollout in ended]
            wanted = len(tasks) * settings.num_generations  # those that were enqueued once more come after these
            numbers = [first + i // settings.num_generations if i < wanted else -1 for i in range(len(ended))]
            collected = await self._judged(collected, numbers)
            read.add(ended, collected, self._records(collected), numbers)
            if batch == settings.max_num_gen_batches:
                break
            equal = [g for g in groups_of_equal_rewards(read.records, read.groups, settings) if g not in replaced]
            tasks = self._other_tasks(seen, len(equal), f"{settings.seed} {step} {batch}")
            if not tasks:
                break
            replaced.update(equal[: len(tasks)])
            seen += tasks
            self._parts.note(f"step {step}: {len(tasks)} groups of equal rewards are replaced by others")
        kl = await self._divergences(read.records) if settings.penalizes_rollouts else None
        return read.rollouts, self._chosen(read, ledger, in_hand, replaced=replaced, kl=kl)

    # --- what asynchronous collection has and this has not -----------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """Return what `restore` takes, as JSON data; None if there is nothing between two steps."""
        return None

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go on from an earlier start of the run."""

    @property
    def in_flight(self) -> Collection[str]:
        """The rollouts that a later step trains."""
        return ()

    def is_to_come(self, rollout: Rollout) -> bool:
        """Return whether a rollout of an earlier start will be asked for in a later step."""
        return False

    def figures(self) -> dict[str, Any]:
        """Return the figures of the collection of the last step; see `StepFigures.flight`."""
        return {}

    async def quiet(self) -> None:
        """Return when no rollout is in flight."""

    async def close(self) -> None:
        """Cancel what is in flight."""

    # --- what both do ------------------------------------------------------------------------------------------------

    async def _judged(self, collected: list[Evidence], groups: Sequence[int]) -> list[Evidence]:
        """Return rollouts with the rewards that were given to their groups, if the run has such."""
        if (group_reward := self._parts.group_reward) is None:
            return collected
        asked: dict[str, Questions] = {}
        collected = await with_group_rewards(group_reward, collected, groups, self._tell_not_judged, asked)
        await store_group_rewards(self._parts.store, collected, asked)
        self._look_at(collected)
        return collected

    def _records(self, collected: Sequence[Evidence]) -> list[RolloutRecord]:
        """Return what each rollout gives to a step."""
        return read_records(
            collected,
            self._parts.adapter,
            decode=self._parts.guard.decode,
            train_refused=self._parts.settings.refused_calls == "train",
            policies=self._parts.learners.names,
        )

    def _chosen(
        self,
        read: ReadRollouts,
        ledger: Ledger,
        in_hand: int,
        *,
        replaced: Collection[int] = (),
        kl: Mapping[str, float] | None = None,
    ) -> StepRows:
        """Choose the rows of a step, and let the watchers of the run see what became of its rollouts."""
        rows = choose_rows(read.records, read.groups, ledger, self._parts.settings, replaced=replaced, kl=kl)
        self._watch(ledger.step, read.collected, rows, in_hand)
        return rows

    def _tell_not_judged(self, text: str) -> None:
        self._parts.alarm(text, "not_judged")

    async def _run_tasks(self, step: int, tasks: Sequence[object], resources_id: str, *, first: int) -> list[Rollout]:
        """Run a group of rollouts for each task; `first` is the number of the first task within the step."""
        settings, take = self._parts.settings, self._parts.resume.take_of(step)
        requests = [
            request
            for number, task in enumerate(tasks, start=first)
            for request in self._requests(task, step, number, take, resources_id)
        ]
        what = f"step {step}"
        return await collect(
            self._parts.store,
            requests,
            timeout_seconds=settings.step_timeout_seconds,
            on_done=lambda done: self._parts.progress.rollouts(done, len(requests), what),
            on_ended=None if self._parts.guard.has_looked or self._parts.group_reward else self._look_at_first,
            late=settings.late_rollouts,
        )

    def _requests(
        self, task: object, step: int, number: int, take: str | None, resources_id: str
    ) -> list[EnqueueRolloutRequest]:
        """Return what is to be asked of the store for a group: the rollouts of one task."""
        return [
            EnqueueRolloutRequest(
                input=task,
                mode="train",
                resources_id=resources_id,
                config=self._parts.limits(),
                metadata=metadata_of(step, number, sample, take),
            )
            for sample in range(self._parts.settings.num_generations)
        ]

    def _other_tasks(self, seen: Sequence[object], count: int, seed: str) -> list[object]:
        """Return up to `count` tasks that the step has not seen, always the same ones for a seed."""
        known = {id(task) for task in seen}
        others = [task for task in self._tasks if id(task) not in known] if count else []
        return random.Random(seed).sample(others, min(count, len(others)))

    async def _divergences(self, records: Sequence[RolloutRecord]) -> dict[str, float]:
        """Return the divergence of each rollout from the reference, in nats."""
        parts, settings = self._parts, self._parts.settings
        samples = [sample for record in records for sample in record.samples]
        if not samples:
            return {}

        def compute() -> list[float]:
            with parts.learners.swap(settings.step_timeout_seconds):
                return parts.learners.divergences(samples)

        sums: dict[str, float] = {}
        for sample, value in zip(samples, await asyncio.to_thread(compute), strict=True):
            sums[sample.rollout_id] = sums.get(sample.rollout_id, 0.0) + value
        return sums

    def _watch(self, step: int, collected: Sequence[Evidence], rows: StepRows, in_hand: int) -> None:
        """Let the watchers of the run see what became of a step's rollouts."""
        self.endings.add(collected, rows)
        self.late.expect(collected, in_hand=in_hand)
        self._parts.guard.count_drift(rows.records)
        if (report := self._parts.guard.untrainable(rows.records)) is not None:
            self._parts.alarm(f"step {step}: {report}", "untrainable")
        if (report := self._parts.guard.refusals(rows.records)) is not None:
            self._parts.alarm(f"step {step}: {report}", "refused_calls")
        if not rows.rewards:
            self._report_failure(step, collected)

    async def _look_at_first(self, ended: Sequence[Rollout]) -> None:
        """Look at the first rollout with a reward as soon as it is there."""
        for rollout in ended:
            if self._parts.guard.has_looked:
                return
            self._look_at([await evidence(self._parts.store, rollout)])

    def _look_at(self, collected: Sequence[Evidence]) -> None:
        for one in collected:
            if (report := self._parts.guard.first_look(one)) is not None:
                self._parts.alarm(report, "first_rollout")

    def _report_failure(self, step: int, collected: Sequence[Evidence]) -> None:
        reason = why_failed(collected)
        text = f"step {step}: none of {len(collected)} rollouts has a reward to learn from; most often: {reason}"
        self._parts.alarm(text, "no_reward")
