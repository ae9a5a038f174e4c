"""Which groups a run samples, and in which order: the tasks of its steps, one after the other."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from agentlightning.training.tasks import batch_iter_over_dataset


class GroupKey(NamedTuple):
    """The name of a group, which its rollouts have in their metadata."""

    step: int
    """The step that it is planned for; a slower group is trained in a later one, a faster one may be in an earlier."""
    task: int
    """Number of its task in that step."""
    take: str | None = None
    """Mark of a start of the run that takes steps anew; see `Resumption.take`."""

    @property
    def place(self) -> tuple[int, int]:
        """Where it is in the plan."""
        return self.step, self.task


class GroupPlan:
    """Gives out the groups of a run in their order. Belongs to the collection."""

    def __init__(self, tasks: Sequence[object], batch_size: int, seed: int) -> None:
        self._source = batch_iter_over_dataset(list(tasks), batch_size, random.Random(seed))
        self._batches: list[list[object]] = []
        self._next = (1, 0)
        self.size = min(batch_size, len(tasks))
        """Groups of a step."""

    @property
    def next(self) -> tuple[int, int]:
        """The place of the first group that was not given out."""
        return self._next

    def draw(self, take: str | None) -> GroupKey:
        """Give out the next group."""
        step, task = self._next
        last = task + 1 == len(self._batch(step))
        self._next = (step + 1, 0) if last else (step, task + 1)
        return GroupKey(step, task, take)

    def go_on_from(self, place: tuple[int, int]) -> None:
        """Give out the group at `place` next."""
        self._next = place

    def task_of(self, key: GroupKey) -> object:
        """Return the task of a group."""
        return self._batch(key.step)[key.task]

    def _batch(self, step: int) -> list[object]:
        while len(self._batches) < step:
            self._batches.append(next(self._source))
        return self._batches[step - 1]


class Standing:
    """Which groups had ended up in no step when a checkpoint was written: what of a run's past is still to be trained.

    Args:
        state: what `FlightCollection.state` returned.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        step, task = state["next"]
        self.next: tuple[int, int] = (step, task)
        self.open = [GroupKey(*key) for key in state["open"]]
        self._known = frozenset(self.open)

    def concerns(self, about: Mapping[str, Any], takes: Collection[object]) -> bool:
        """Return whether a rollout with this metadata is of an open group, or of one that came after the checkpoint."""
        key = key_of(about)
        return key in self._known or (key.place >= self.next and key.take in takes)


def key_of(about: Mapping[str, Any]) -> GroupKey:
    """Return the name of the group of a training rollout by its metadata."""
    return GroupKey(about.get("step", 0), about.get("task", 0), about.get("take"))
