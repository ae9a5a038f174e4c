"""A time limit that never loses a cancellation, and a loop that counts each Ctrl+C once."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from agentlightning.utils.concurrency.interrupts import Interrupts
from agentlightning.utils.concurrency.loops import run, within


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

    with pytest.raises(asyncio.TimeoutError, match=r"not done within 0\.01 s"):
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


def _interrupt_soon() -> None:
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()


async def _outlive(interrupts: Interrupts, work: Callable[[], Awaitable[None]]) -> bool:
    """Run the work in a task beside, as a runner is run; return whether a second Ctrl+C was counted."""
    beside = asyncio.create_task(work())
    await interrupts.asked()
    await asyncio.wait({beside})
    beside.exception()
    await asyncio.sleep(0.05)
    hurried = asyncio.create_task(interrupts.hurried())
    await asyncio.wait({hurried}, timeout=0.05)
    return hurried.done() or not hurried.cancel()


def test_one_ctrl_c_is_one_though_it_breaks_off_a_call_that_blocks_the_loop() -> None:
    async def block() -> None:
        _interrupt_soon()
        time.sleep(30)  # noqa: ASYNC251 -- as a synchronous agent does

    assert not run(lambda interrupts: _outlive(interrupts, block))


def test_a_keyboard_interrupt_that_is_raised_again_by_who_awaits_it_is_one() -> None:
    async def raise_it() -> None:
        raise KeyboardInterrupt

    async def await_it() -> None:
        await asyncio.create_task(raise_it())

    assert not run(lambda interrupts: _outlive(interrupts, await_it))


def test_a_second_ctrl_c_is_a_second_one() -> None:
    async def both() -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0)
        signal.raise_signal(signal.SIGINT)

    assert run(lambda interrupts: _outlive(interrupts, both))
