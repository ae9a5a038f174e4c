"""The groups of rollouts of a run: each has a task, a name by which a later start finds it, and a place in the order.

Groups are planned step by step, `batch_size` tasks each. A rollout has the name of its group in its metadata.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from agentlightning.training.tasks import batch_iter_over_dataset
from agentlightning.types import Rollout

TAKE: Final = "take"
"""Metadata of rollouts of a step that is taken anew; see `Resumption.take`."""


class GroupKey(NamedTuple):
    """The name of a group."""

    step: int
    """The step that it is planned for; a slow group is trained in a later one, a fast one perhaps in an earlier one."""
    task: int
    """Number of its task in that step."""
    take: str | None = None
    """Mark of a start of the run that takes steps anew; see `Resumption.take`."""

    @property
    def place(self) -> tuple[int, int]:
        """Where it is in the plan."""
        return self.step, self.task


def key_of(metadata: Mapping[str, Any]) -> GroupKey:
    """Return the name of the group of a training rollout."""
    return GroupKey(metadata.get("step", 0), metadata.get("task", 0), metadata.get(TAKE))


def metadata_of(step: int, task: int, sample: int, take: str | None) -> dict[str, object]:
    """Return the metadata of a training rollout, by which a later start of the run finds it."""
    return {"step": step, "task": task, "sample": sample, **({} if take is None else {TAKE: take})}


def place_of(rollout: Rollout) -> str | None:
    """Return the place of a rollout in the run, for its seed; None if the loop did not make it."""
    metadata = rollout.metadata or {}
    if not isinstance(metadata.get("step"), int) or not isinstance(metadata.get("task"), int):
        return None
    parts = (rollout.mode, metadata.get("sampling"), metadata["step"], metadata["task"], metadata.get("sample"))
    return " ".join(map(str, parts))


class GroupPlan:
    """The groups of a run in their order. Belongs to the collector.

    Attributes:
        next: place of the first group that was not drawn.
        size: groups of a step.
    """

    def __init__(self, tasks: Sequence[object], batch_size: int, seed: int) -> None:
        self._source = batch_iter_over_dataset(list(tasks), batch_size, random.Random(seed))
        self._batches: list[list[object]] = []
        self.next: tuple[int, int] = (1, 0)
        self.size = min(batch_size, len(tasks))

    def draw(self, take: str | None) -> GroupKey:
        """Return the next group."""
        step, task = self.next
        last = task + 1 == len(self.tasks_of(step))
        self.next = (step + 1, 0) if last else (step, task + 1)
        return GroupKey(step, task, take)

    def tasks_of(self, step: int) -> list[object]:
        """Return the tasks of the groups that are planned for a step."""
        while len(self._batches) < step:
            self._batches.append(next(self._source))
        return self._batches[step - 1]


class OpenGroups:
    """The groups that were in no step yet when a checkpoint was written: what of a run's past is still to be trained.

    Args:
        state: what `Collector.state` returned.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        step, task = state["next"]
        self.next: tuple[int, int] = (step, task)
        self.keys = [GroupKey(*key) for key in state["open"]]

    def concerns(self, metadata: Mapping[str, Any], takes: Collection[object]) -> bool:
        """Return whether a rollout with this metadata is of an open group, or of one that came after the checkpoint."""
        key = key_of(metadata)
        return key in self.keys or (key.place >= self.next and key.take in takes)
