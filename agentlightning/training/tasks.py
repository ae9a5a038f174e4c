"""The tasks of a run in order or by solve rate, and their groups of rollouts.

A step has `batch_size` tasks, each with one group of rollouts. The metadata of a rollout has the name of its group,
with which a later start of the run finds it.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, Final, NamedTuple, TypeVar

from agentlightning.errors import BadRequestError
from agentlightning.types import Dataset, Rollout, RolloutConfig

T = TypeVar("T")

TAKE: Final = "take"
"""Metadata key of rollouts of a step that is repeated with other weights; see `Resumption.take`."""
FLOOR: Final = 0.01
"""Weight in the draw of a task whose solve rate is 0 or 1. A rate of one half has 0.25 more."""
KEPT: Final = 0.9
"""Share of the weight of earlier rollouts of a task that remains with each later rollout."""
UNSEEN: Final = 0.5
"""Number of rollouts for which the rate of an unseen task counts in each solve rate."""


def items_of(dataset: Dataset[Any] | None) -> list[object]:
    """Return the tasks of a dataset; an empty list for None."""
    return [] if dataset is None else [dataset[index] for index in range(len(dataset))]


def batch_iter_over_dataset(
    dataset: Dataset[T], batch_size: int, rng: random.Random | None = None, *, shuffle: bool = True
) -> Iterator[list[T]]:
    """Yield batches forever, each pass over the dataset in a new order; no batch holds an item twice.

    A batch may span two passes. A `batch_size` of at least the dataset's length yields the whole dataset each time.
    `rng` shuffles the order; the default is the shared generator of the module `random`. With `shuffle=False`, each
    pass has the order of the dataset.

    Raises:
        BadRequestError: the dataset is empty or `batch_size` is not positive.
    """
    if len(dataset) == 0 or batch_size < 1:
        raise BadRequestError(
            f"The dataset must not be empty and batch_size must be at least 1; got {len(dataset)} items, "
            f"batch_size={batch_size}"
        )
    reorder = (random.shuffle if rng is None else rng.shuffle) if shuffle else None
    return _batches(dataset, min(batch_size, len(dataset)), reorder)


def _batches(dataset: Dataset[T], size: int, shuffle: Callable[[list[int]], None] | None) -> Iterator[list[T]]:
    rest: list[int] = []
    while True:
        batch, rest = rest[:size], rest[size:]
        if len(batch) < size:
            order = list(range(len(dataset)))
            if shuffle is not None:
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


class Curriculum:
    """The solve rates of a run's tasks, by which the tasks of a step are drawn. Belongs to the collector.

    A task with solve rate p is drawn with the weight p (1 - p) + `FLOOR`: its learnability (Foster et al., 2025,
    arXiv:2502.12272), and a floor with which every task remains in the draw. A solve rate is a mean over the rollouts
    of the task, in which earlier ones count less (`KEPT`); one of one half counts as `UNSEEN` rollouts. A draw depends
    only on the seed, on its step and on the results before it.
    """

    def __init__(self, tasks: int, seed: int, solved_above: float | None) -> None:
        self._tasks, self._seed, self._solved_above = tasks, seed, solved_above
        self._low, self._high = 0.0, 1.0  # limits of the rewards, with those seen
        self._seen: dict[int, tuple[float, float, int]] = {}  # sum and count of rewards, both decayed; groups

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as JSON data."""
        tasks = {str(task): list(values) for task, values in sorted(self._seen.items())}
        return {"low": self._low, "high": self._high, "tasks": tasks}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of an earlier start of the run."""
        self._low, self._high = state["low"], state["high"]
        self._seen = {int(task): (total, count, groups) for task, (total, count, groups) in state["tasks"].items()}

    def rate(self, task: int) -> float:
        """Return the solve rate of a task, by its index; one half if it is unseen."""
        total, count, _ = self._seen.get(task, (0.0, 0.0, 0))
        solved = (total - self._low * count) / (self._high - self._low)
        return (solved + 0.5 * UNSEEN) / (count + UNSEEN)

    def draw(self, step: int, batch: int, tasks: Iterable[int], count: int) -> list[int]:
        """Return up to `count` of the tasks, none twice. `batch` is 0 for the tasks of a step, then counts those that
        replace groups with equal rewards."""
        rng = random.Random(f"{self._seed} {step} {batch} curriculum")
        # the first of exponential waiting times are a weighted sample without replacement (Efraimidis and Spirakis)
        waits = {task: rng.expovariate(p * (1.0 - p) + FLOOR) for task in tasks for p in (self.rate(task),)}
        return heapq.nsmallest(count, waits, key=waits.__getitem__)

    def add(self, groups: Sequence[tuple[int, Sequence[float]]]) -> dict[str, float]:
        """Add the groups of a step, each a task with its rewards; return the figures of `StepFigures.curriculum`."""
        drawn = fmean(self.rate(task) for task, _ in groups)
        for task, rewards in groups:
            total, count, times = self._seen.get(task, (0.0, 0.0, 0))
            limit = self._solved_above
            for value in rewards if limit is None else [float(reward > limit) for reward in rewards]:
                self._low, self._high = min(self._low, value), max(self._high, value)
                total, count = KEPT * total + value, KEPT * count + 1.0
            self._seen[task] = total, count, times + 1
        most = max(times for *_, times in self._seen.values())
        return {"solve_rate": drawn, "seen": len(self._seen) / self._tasks, "most_groups": most}


class GroupPlan:
    """The groups of a run in their order. Belongs to the collector."""

    def __init__(
        self,
        tasks: Sequence[object],
        batch_size: int,
        seed: int,
        *,
        shuffle: bool = True,
        curriculum: Curriculum | None = None,
    ) -> None:
        self._tasks, self._seed, self._curriculum = tasks, seed, curriculum
        self._source = batch_iter_over_dataset(range(len(tasks)), batch_size, random.Random(seed), shuffle=shuffle)
        self._batches: list[list[int]] = []
        self._drawn: tuple[int, list[int]] = 0, []
        self.next: tuple[int, int] = (1, 0)
        """Position of the first group that is not drawn yet."""
        self.size = min(batch_size, len(tasks))
        """Number of groups of a step."""

    def draw(self, take: str | None) -> GroupKey:
        """Return the next group."""
        step, task = self.next
        self.next = (step + 1, 0) if task + 1 == self.size else (step, task + 1)
        return GroupKey(step, task, take)

    def tasks_of(self, step: int) -> list[object]:
        """Return the tasks of the planned groups of a step."""
        return [self._tasks[index] for index in self.indices_of(step)]

    def indices_of(self, step: int) -> list[int]:
        """Return the indices of these tasks. A curriculum draws them in the first call for a step, by the results that
        it has then."""
        if self._curriculum is not None:
            if self._drawn[0] != step:
                self._drawn = step, self._curriculum.draw(step, 0, range(len(self._tasks)), self.size)
            return self._drawn[1]
        while len(self._batches) < step:
            self._batches.append(next(self._source))
        return self._batches[step - 1]

    def others(self, step: int, batch: int, without: Iterable[int], count: int) -> list[int]:
        """Return the indices of up to `count` tasks other than those `without`, the same ones for the same seed."""
        excluded = {id(self._tasks[index]) for index in without}
        rest = [index for index, task in enumerate(self._tasks) if id(task) not in excluded] if count else []
        if self._curriculum is not None:
            return self._curriculum.draw(step, batch, rest, count)
        return random.Random(f"{self._seed} {step} {batch}").sample(rest, min(count, len(rest)))


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
