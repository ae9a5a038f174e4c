"""Asynchronous collection: a step takes the groups that end first, while those of later steps are in flight.

When the collection of a step begins, groups are started until `max_staleness + 1` times `batch_size` are in flight. The
step takes `batch_size` of them, in the order of the plan among those that have ended. What is left stays in flight
while the weights change: for `max_staleness` updates if groups end in their order. One that took longer, and has a
reply of older weights than that, is dropped when it ends, and another one is started in its place.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from agentlightning.training.collection import ReadRollouts, RolloutCollection
from agentlightning.training.flight.flight import Flight
from agentlightning.training.flight.plan import GroupKey, GroupPlan, Standing, key_of
from agentlightning.training.flight.staleness import age_of_group, dropped, staleness_figures
from agentlightning.training.ledger import Ledger, RolloutRecord
from agentlightning.training.parts import RunParts
from agentlightning.training.rollouts import Evidence, collect, evidence
from agentlightning.training.rows import StepRows
from agentlightning.types import Rollout


class FlightCollection(RolloutCollection):
    """Collects the rollouts of each step while others are in flight. Belongs to the loop."""

    def __init__(self, parts: RunParts, tasks: list[object]) -> None:
        super().__init__(parts, tasks)
        self._plan = GroupPlan(tasks, parts.settings.batch_size, parts.settings.seed)
        self._flight = Flight()
        self._again: list[GroupKey] = []  # in flight when an earlier start ended, in their order
        self._figures: dict[str, Any] = {}

    # --- between two steps -------------------------------------------------------------------------------------------

    @override
    def state(self) -> dict[str, Any]:
        return {"next": list(self._plan.next), "open": [list(key) for key in [*self._flight.keys, *self._again]]}

    @override
    def restore(self, state: Mapping[str, Any] | None) -> None:
        if state is not None:  # None: the run was begun by a version that collects synchronously
            standing = Standing(state)
            self._plan.go_on_from(standing.next)
            self._again = standing.open
        elif self._parts.resume.steps:
            self._plan.go_on_from((self._parts.resume.steps + 1, 0))

    @property
    @override
    def in_flight(self) -> Collection[str]:
        return self._flight.rollouts

    @override
    def is_to_come(self, rollout: Rollout) -> bool:
        key = key_of(rollout.metadata or {})
        return (
            key in self._again
            or key in self._flight
            or (key.place >= self._plan.next and key.take == self._parts.resume.take)
        )

    @override
    def figures(self) -> dict[str, Any]:
        return self._figures

    @override
    async def quiet(self) -> None:
        await self._flight.quiet()

    @override
    async def close(self) -> None:
        await self._flight.close()

    # --- a step ------------------------------------------------------------------------------------------------------

    @override
    async def collect(
        self, step: int, tasks: Sequence[object], resources_id: str, ledger: Ledger
    ) -> tuple[list[Rollout], StepRows]:
        """Take the groups of a step; `tasks` are not looked at, since those in flight are of several steps."""
        settings, version = self._parts.settings, self._parts.learners.weight_version
        self._fill(step, resources_id)
        in_flight, wanted = len(self._flight), self._plan.size
        before = self._before(step)
        taken, left_out = dict[GroupKey, _Group](), dict[GroupKey, _Group]()
        while len(taken) < wanted:
            group = await self._next_group(before - taken.keys() - left_out.keys())
            age = age_of_group(group.records, version)
            if age is not None and age > settings.max_staleness:
                unjudged = self._parts.group_reward is not None
                group.records = [dropped(record, unjudged=unjudged) for record in group.records]
                left_out[group.key] = group
                self._fill(step, resources_id, taken=len(taken))
                continue
            taken[group.key] = group
            done = len(taken) * settings.num_generations
            self._parts.progress.rollouts(done, wanted * settings.num_generations, f"step {step}")
        if left_out:
            text = f"step {step}: {len(left_out)} groups were older than max_staleness={settings.max_staleness} allows"
            self._parts.note(text + " and are dropped")
        read, groups = ReadRollouts(), [*_in_order(taken), *_in_order(left_out)]
        for number, group in enumerate(groups):
            numbers = [number if i < settings.num_generations else -1 for i in range(len(group.rollouts))]
            found, records = group.found, group.records
            if self._parts.group_reward is not None and group.key in taken:
                found = await self._judged(found, numbers)
                records = self._records(found)
            read.add(group.rollouts, found, records, numbers)
        rows = self._chosen(read, ledger, max(group.in_hand for group in groups))
        self._figures = {
            "in_flight": in_flight,
            "waited_seconds": sum(group.waited for group in groups),
            **staleness_figures(rows.samples, version),
            "dropped_groups": len(left_out),
            "taken": [list(group.key) for group in _in_order(taken)],
            "dropped": [list(group.key) for group in _in_order(left_out)],
        }
        return read.rollouts, rows

    def _before(self, step: int) -> set[GroupKey]:
        """Return the groups that the step took and dropped when it was taken first; none if it is taken now."""
        recorded = self._parts.resume.recorded.get(step, {}).get("flight") or {}
        return {GroupKey(*key) for name in ("taken", "dropped") for key in recorded.get(name, ())}

    async def _next_group(self, among: Collection[GroupKey]) -> _Group:
        began = time.monotonic()
        key, rollouts = await self._flight.take([key for key in among if key in self._flight] or None)
        waited = time.monotonic() - began
        in_hand = self._parts.proxy.calls_in_hand(outside=self.in_flight)
        found = [await evidence(self._parts.store, rollout, note=True) for rollout in rollouts]
        return _Group(key, rollouts, found, self._records(found), in_hand, waited)

    def _fill(self, step: int, resources_id: str, *, taken: int = 0) -> None:
        """Start groups until as many are in flight as may be, and no more than the run will train."""
        settings = self._parts.settings
        left = (settings.max_steps - step + 1) * self._plan.size - taken
        most = (settings.max_staleness + 1) * self._plan.size - taken
        take = self._parts.resume.take_of(step)
        while len(self._flight) < min(left, most):
            key = self._again.pop(0) if self._again else self._plan.draw(take)
            self._flight.start(key, functools.partial(self._run, resources_id))

    async def _run(
        self, resources_id: str, key: GroupKey, on_enqueued: Callable[[Sequence[Rollout]], None]
    ) -> list[Rollout]:
        """Run the rollouts of a group. Its time is that of all steps that it may be in flight."""
        settings, guard = self._parts.settings, self._parts.guard
        looks = not (guard.has_looked or self._parts.group_reward) and key.place == (self._parts.step, 0)
        return await collect(
            self._parts.store,
            self._requests(self._plan.task_of(key), *key, resources_id),
            timeout_seconds=settings.step_timeout_seconds * (settings.max_staleness + 1),
            on_ended=self._look_at_first if looks else None,
            on_enqueued=on_enqueued,
            late=settings.late_rollouts,
        )


@dataclass
class _Group:
    """A group at its end, as it was read."""

    key: GroupKey
    rollouts: list[Rollout]
    found: list[Evidence]
    records: list[RolloutRecord]
    in_hand: int
    """Calls that the gateway had in hand before it was read, those of groups in flight left out."""
    waited: float
    """Seconds."""


def _in_order(groups: Mapping[GroupKey, _Group]) -> list[_Group]:
    return [groups[key] for key in sorted(groups, key=lambda key: key.place)]
