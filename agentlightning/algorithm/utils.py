"""Helpers for algorithms: batches over a dataset, the gateway for a block, decorators that pass store and gateway."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from agentlightning.training.tasks import batch_iter_over_dataset as batch_iter_over_dataset

if TYPE_CHECKING:
    from agentlightning.algorithm.base import Algorithm
    from agentlightning.llm_proxy import LLMProxy

T = TypeVar("T")


@asynccontextmanager
async def running_llm_proxy(
    algorithm: Algorithm, *, required: bool = False, auto_start: bool = True
) -> AsyncGenerator[LLMProxy | None]:
    """Yield the gateway of an algorithm, or None. A gateway that is not running is started for the block.

    Raises:
        ValueError: `required` is True, but the algorithm has no gateway.
    """
    proxy = algorithm.get_llm_proxy()
    if proxy is None and required:
        raise ValueError(f"{type(algorithm).__name__} needs an LLM proxy: pass llm_proxy= to the Trainer")
    if proxy is None or not auto_start or proxy.is_running():
        yield proxy
        return
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()


def with_store(method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Pass the algorithm's store to a coroutine method, as its first argument after self."""

    @functools.wraps(method)
    async def wrapped(self: Algorithm, *args: object, **kwargs: object) -> T:
        return await method(self, self.get_store(), *args, **kwargs)

    return wrapped


def with_llm_proxy(
    required: bool = False, auto_start: bool = True
) -> Callable[[Callable[..., Awaitable[T]]], Callable[..., Awaitable[T]]]:
    """Pass the algorithm's gateway (or None) to a coroutine method, as its first argument after self; see
    `running_llm_proxy`."""

    def decorate(method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
        @functools.wraps(method)
        async def wrapped(self: Algorithm, *args: object, **kwargs: object) -> T:
            async with running_llm_proxy(self, required=required, auto_start=auto_start) as proxy:
                return await method(self, proxy, *args, **kwargs)

        return wrapped

    return decorate
