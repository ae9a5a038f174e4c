"""A time limit that never loses a cancellation."""

from __future__ import annotations

import asyncio

import pytest

from agentlightning.utils.concurrency.loops import within


async def test_the_result_or_the_error_of_the_work_comes_through() -> None:
    async def give() -> int:
        return 3

    async def fail() -> int:
        raise KeyError("x")

    assert await within(5, give()) == 3
    with pytest.raises(KeyError):
        await within(5, fail())


async def test_work_that_takes_too_long_is_cancelled_and_has_ended() -> None:
    ended = asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(asyncio.TimeoutError, match=r"no end within 0\.01 s"):
        await within(0.01, hang())
    assert ended.is_set()


async def test_a_cancellation_that_meets_the_end_of_the_work_is_not_lost() -> None:
    """At this moment `asyncio.wait_for` before Python 3.12 returns the result and forgets the cancellation."""

    async def instant() -> int:
        return 3

    async def caller() -> int:
        return await within(5, instant())

    task = asyncio.create_task(caller())
    await asyncio.sleep(0)  # the caller waits, the work is done within the same turn of the loop
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
