"""A time limit for what mostly has nothing to wait for, such as a question to a store in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Generator
from types import CoroutineType
from typing import Any, Generic, TypeVar, cast

from typing_extensions import override

T = TypeVar("T")


async def within(seconds: float, question: Awaitable[T]) -> T:
    """Return what is awaited; one that answers without waiting costs no timer, which is eight microseconds.

    Raises:
        TimeoutError: there was no answer within `seconds`; the question was cancelled.
    """
    if not isinstance(question, CoroutineType):
        async with asyncio.timeout(seconds):
            return await question
    coroutine = cast("Coroutine[Any, Any, T]", question)
    try:
        waits_for = coroutine.send(None)
    except StopIteration as answered:
        return answered.value
    async with asyncio.timeout(seconds):
        return await _Begun(coroutine, waits_for)


class _Begun(Awaitable[T], Generic[T]):
    """The rest of a coroutine that has run to its first wait."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], waits_for: object) -> None:
        self._coroutine, self._waits_for = coroutine, waits_for

    @override
    def __await__(self) -> Generator[Any, Any, T]:
        waits_for = self._waits_for
        try:
            while True:
                try:
                    woken = yield waits_for
                except GeneratorExit:
                    raise
                except BaseException as error:  # a cancelled caller, or a wait that failed: the coroutine's to answer
                    waits_for = self._coroutine.throw(error)
                else:
                    waits_for = self._coroutine.send(woken)
        except StopIteration as answered:
            return answered.value
        finally:
            self._coroutine.close()
