"""Helpers for algorithms: batches over a dataset, and decorators that pass store and gateway."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from agentlightning.training.tasks import batch_iter_over_dataset as batch_iter_over_dataset

if TYPE_CHECKING:
    from agentlightning.algorithm.base import Algorithm

T = TypeVar("T")


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
