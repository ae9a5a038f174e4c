"""Helpers for algorithms: batches over a dataset, time limits, and decorators that pass store and gateway."""

from __future__ import annotations

import functools
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from agentlightning.errors import BadRequestError
from agentlightning.types import Dataset, RolloutConfig

if TYPE_CHECKING:
    from agentlightning.algorithm.base import Algorithm

T = TypeVar("T")


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


def with_store(method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Pass the algorithm's store to a coroutine method, as its first argument after self."""

    @functools.wraps(method)
    async def wrapped(self: Algorithm, *args: object, **kwargs: object) -> T:
        return await method(self, self.get_store(), *args, **kwargs)

    return wrapped


def with_llm_proxy(
    required: bool = False, auto_start: bool = True
) -> Callable[[Callable[..., Awaitable[T]]], Callable[..., Awaitable[T]]]:
    """Pass the algorithm's gateway (or None) to a coroutine method, as its first argument after self.

    With `auto_start` a gateway that does not run is started before and stopped after, also on an error.

    Raises (when called):
        ValueError: `required` and there is none.
    """

    def decorate(method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
        @functools.wraps(method)
        async def wrapped(self: Algorithm, *args: object, **kwargs: object) -> T:
            proxy = self.get_llm_proxy()
            if proxy is None and required:
                raise ValueError(f"{type(self).__name__} needs an LLM proxy: pass llm_proxy= to the Trainer")
            if proxy is None or not auto_start or proxy.is_running():
                return await method(self, proxy, *args, **kwargs)
            await proxy.start()
            try:
                return await method(self, proxy, *args, **kwargs)
            finally:
                await proxy.stop()

        return wrapped

    return decorate
