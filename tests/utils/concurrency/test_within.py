"""A time limit that costs nothing where there is nothing to wait for."""

from __future__ import annotations

import asyncio

import pytest

from agentlightning.utils.concurrency.within import within


async def answer(value: str, waits: int, ends: list[str] | None = None) -> str:
    """Wait so many times, then answer."""
    try:
        for _ in range(waits):
            await asyncio.sleep(0)
        return value
    finally:
        if ends is not None:
            ends.append(value)


@pytest.mark.parametrize("waits", [0, 1, 5])
async def test_the_answer_comes_however_often_the_question_waits(waits: int):
    assert await within(5.0, answer("yes", waits)) == "yes"
    assert await within(5.0, asyncio.ensure_future(answer("yes", waits))) == "yes"


async def test_what_has_nothing_to_wait_for_is_answered_in_no_time_at_all():
    assert await within(0.0, answer("yes", 0)) == "yes"


async def test_a_question_that_takes_too_long_is_cancelled_and_tidies_up():
    ends: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await answer("tidied", 3, ends)

    with pytest.raises(TimeoutError):
        await within(0.01, answer("late", 10**9, ends))
    assert ends == ["late"]
    with pytest.raises(TimeoutError):
        await within(0.01, slow())
    assert ends == ["late", "tidied"]


@pytest.mark.parametrize("waits", [0, 2])
async def test_an_error_of_the_question_passes_as_it_is(waits: int):
    async def fail() -> None:
        await answer("", waits)
        raise KeyError("the question's own")

    with pytest.raises(KeyError, match="own"):
        await within(5.0, fail())


async def test_a_caller_that_is_cancelled_cancels_the_question():
    ends: list[str] = []
    asking = asyncio.ensure_future(within(60.0, answer("late", 10**9, ends)))
    await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert ends == ["late"]


async def test_what_the_question_awaits_may_fail_and_be_answered_by_it():
    broken = asyncio.get_running_loop().create_future()

    async def recover() -> str:
        try:
            return await broken
        except OSError:
            return await answer("recovered", 2)

    asyncio.get_running_loop().call_soon(broken.set_exception, OSError("gone"))
    assert await within(5.0, recover()) == "recovered"
