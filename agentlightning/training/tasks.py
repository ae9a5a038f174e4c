"""The tasks of a run: batches over a dataset, and the time limit of their rollouts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from agentlightning.errors import BadRequestError
from agentlightning.types import Dataset, RolloutConfig

T = TypeVar("T")


def items_of(dataset: Dataset[Any] | None) -> list[object]:
    """Return the tasks of a dataset; none without one."""
    return [] if dataset is None else [dataset[index] for index in range(len(dataset))]


def batch_iter_over_dataset(
    dataset: Dataset[T], batch_size: int, rng: random.Random | None = None
) -> Iterator[list[T]]:
    """Yield batches for ever, each pass over the dataset in a new order; no batch holds an item twice.

    A batch may span two passes. `batch_size` of the dataset's length or more gives the whole dataset, shuffled, each
    time. The order is drawn from `rng`, or from the shared generator of the module `random` without one.

    Raises:
        BadRequestError: the dataset is empty or `batch_size` is not positive.
    """
    if len(dataset) == 0 or batch_size < 1:
        raise BadRequestError(
            f"batches need items and a size of 1 or more; got {len(dataset)} items, size {batch_size}"
        )
    return _batches(dataset, min(batch_size, len(dataset)), random.shuffle if rng is None else rng.shuffle)


def _batches(dataset: Dataset[T], size: int, shuffle: Callable[[list[int]], None]) -> Iterator[list[T]]:
    left: list[int] = []
    while True:
        batch, left = left[:size], left[size:]
        if len(batch) < size:
            order = list(range(len(dataset)))
            shuffle(order)
            fresh = [index for index in order if index not in batch]
            batch += (taken := fresh[: size - len(batch)])
            left = [index for index in order if index not in taken]
        yield [dataset[index] for index in batch]


def with_timeout(config: RolloutConfig | None, timeout_seconds: float) -> RolloutConfig:
    """Return the Trainer's configuration of rollouts, with a time limit if it has none of its own."""
    if config is not None and config.timeout_seconds is not None:
        return config
    return (config or RolloutConfig()).model_copy(update={"timeout_seconds": timeout_seconds})
