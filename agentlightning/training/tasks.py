"""The tasks of a run in order, and their groups of rollouts.

A step has `batch_size` tasks, each with one group of rollouts. The metadata of a rollout has the name of its group,
with which a later start of the run finds it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from agentlightning.errors import BadRequestError
from agentlightning.types import Dataset, Rollout, RolloutConfig

T = TypeVar("T")

TAKE: Final = "take"
"""Metadata key of rollouts of a step that is repeated with other weights; see `Resumption.take`."""


def items_of(dataset: Dataset[Any] | None) -> list[object]:
    """Return the tasks of a dataset; an empty list for None."""
    return [] if dataset is None else [dataset[index] for index in range(len(dataset))]


def batch_iter_over_dataset(
    dataset: Dataset[T], batch_size: int, rng: random.Random | None = None
) -> Iterator[list[T]]:
    """Yield batches forever, each pass over the dataset in a new order; no batch holds an item twice.

    A batch may span two passes. A `batch_size` of at least the dataset's length yields the whole dataset, shuffled,
    each time. `rng` shuffles the order; the default is the shared generator of the module `random`.

    Raises:
        BadRequestError: the dataset is empty or `batch_size` is not positive.
    """
    if len(dataset) == 0 or batch_size < 1:
        raise BadRequestError(
            f"The dataset must not be empty and batch_size must be at least 1; got {len(dataset)} items, "
            f"batch_size={batch_size}"
        )
    return _batches(dataset, min(batch_size, len(dataset)), random.shuffle if rng is None else rng.shuffle)


def _batches(dataset: Dataset[T], size: int, shuffle: Callable[[list[int]], None]) -> Iterator[list[T]]:
    rest: list[int] = []
    while True:
        batch, rest = rest[:size], rest[size:]
        if len(batch) < size:
            order = list(range(len(dataset)))
            shuffle(order)
            drawn = [index for index in order if index not in batch][: size - len(batch)]
            batch += drawn
            rest = [index for index in order if index not in drawn]
        yield [dataset[index] for index in batch]


def with_timeout(config: RolloutConfig | None, timeout_seconds: float) -> RolloutConfig:
    """Return the Trainer's configuration of rollouts, with a time limit if it has none."""
    if config is not None and config.timeout_seconds is not None:
        return config
    return (config or RolloutConfig()).model_copy(update={"timeout_seconds": timeout_seconds})


class GroupKey(NamedTuple):
    """The name of a group."""

    step: int
    """The planned step. A slow group is trained in a later step, a fast group possibly in an earlier step."""
    task: int
    """Number of its task in that step."""
    take: str | None = None
    """Marker of a start of the run that repeats steps with other weights; see `Resumption.take`."""

    @property
    def place(self) -> tuple[int, int]:
        """Position in the plan."""
        return self.step, self.task


def key_of(metadata: Mapping[str, Any]) -> GroupKey:
    """Return the name of the group of a training rollout."""
    return GroupKey(metadata.get("step", 0), metadata.get("task", 0), metadata.get(TAKE))


def metadata_of(step: int, task: int, sample: int, take: str | None) -> dict[str, object]:
    """Return the metadata of a training rollout, with which a later start of the run finds it."""
    return {"step": step, "task": task, "sample": sample, **({} if take is None else {TAKE: take})}


def place_of(rollout: Rollout) -> str | None:
    """Return the position of a rollout in the run, for its seed; None if the loop did not create it."""
    metadata = rollout.metadata or {}
    if not isinstance(metadata.get("step"), int) or not isinstance(metadata.get("task"), int):
        return None
    parts = (rollout.mode, metadata.get("sampling"), metadata["step"], metadata["task"], metadata.get("sample"))
    return " ".join(map(str, parts))


class GroupPlan:
    """The groups of a run in their order. Belongs to the collector."""

    def __init__(self, tasks: Sequence[object], batch_size: int, seed: int) -> None:
        self._source = batch_iter_over_dataset(list(tasks), batch_size, random.Random(seed))
        self._batches: list[list[object]] = []
        self.next: tuple[int, int] = (1, 0)
        """Position of the first group that is not drawn yet."""
        self.size = min(batch_size, len(tasks))
        """Number of groups of a step."""

    def draw(self, take: str | None) -> GroupKey:
        """Return the next group."""
        step, task = self.next
        last = task + 1 == len(self.tasks_of(step))
        self.next = (step + 1, 0) if last else (step, task + 1)
        return GroupKey(step, task, take)

    def tasks_of(self, step: int) -> list[object]:
        """Return the tasks of the planned groups of a step."""
        while len(self._batches) < step:
            self._batches.append(next(self._source))
        return self._batches[step - 1]


class OpenGroups:
    """The groups that no step had taken when a checkpoint was written, from `StepCollector.state`."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        step, task = state["next"]
        self.next: tuple[int, int] = (step, task)
        self.keys = [GroupKey(*key) for key in state["open"]]

    def concerns(self, metadata: Mapping[str, Any], takes: Collection[object]) -> bool:
        """Return whether a rollout with this metadata belongs to an open group, or to one after the checkpoint."""
        key = key_of(metadata)
        return key in self.keys or (key.place >= self.next and key.take in takes)
