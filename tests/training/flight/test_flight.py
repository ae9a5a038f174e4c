"""Groups in flight are taken in the order of the plan among those that have ended, and cancelled together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from agentlightning.training.flight.flight import Flight, Start

from agentlightning.training.groups import GroupKey
from agentlightning.types import Rollout

FIRST, SECOND, THIRD = GroupKey(1, 0), GroupKey(1, 1), GroupKey(2, 0)


def ends_with(gate: asyncio.Event, ended: list[GroupKey], error: Exception | None = None) -> Start:
    async def run(key: GroupKey, on_enqueued: Callable[[Sequence[Rollout]], None]) -> list[Rollout]:
        rollout = Rollout(rollout_id=f"ro-{key.step}-{key.task}", input="task", start_time=0.0)
        on_enqueued([rollout])
        try:
            await gate.wait()
        finally:
            ended.append(key)
        if error is not None:
            raise error
        return [rollout]

    return run


async def test_a_slow_group_holds_nobody_up_and_stays_in_flight() -> None:
    flight, slow, fast, ended = Flight(), asyncio.Event(), asyncio.Event(), list[GroupKey]()
    for key in (THIRD, SECOND):
        flight.start(key, ends_with(fast, ended))
    flight.start(FIRST, ends_with(slow, ended))
    await asyncio.sleep(0)
    assert flight.rollouts == {"ro-1-0", "ro-1-1", "ro-2-0"}
    fast.set()
    taken = [(await flight.take())[0] for _ in range(2)]
    assert taken == [SECOND, THIRD]
    assert flight.keys == [FIRST]
    assert flight.rollouts == {"ro-1-0"}
    slow.set()
    key, rollouts = await flight.take()
    assert (key, [rollout.rollout_id for rollout in rollouts]) == (FIRST, ["ro-1-0"])
    assert len(flight) == 0


async def test_a_certain_group_can_be_waited_for() -> None:
    flight, slow, fast, ended = Flight(), asyncio.Event(), asyncio.Event(), list[GroupKey]()
    flight.start(FIRST, ends_with(fast, ended))
    flight.start(SECOND, ends_with(slow, ended))
    fast.set()
    waiting = asyncio.ensure_future(flight.take([SECOND]))
    await flight_rests()
    assert not waiting.done()
    slow.set()
    assert (await waiting)[0] == SECOND


async def test_quiet_waits_for_all_and_leaves_them_to_be_taken() -> None:
    flight, gate, ended = Flight(), asyncio.Event(), list[GroupKey]()
    for key in (FIRST, SECOND):
        flight.start(key, ends_with(gate, ended))
    waiting = asyncio.ensure_future(flight.quiet())
    await flight_rests()
    assert not waiting.done()
    gate.set()
    await waiting
    assert flight.keys == [FIRST, SECOND]
    await Flight().quiet()


async def test_closing_cancels_every_group_and_waits_for_its_end() -> None:
    flight, gate, ended = Flight(), asyncio.Event(), list[GroupKey]()
    for key in (FIRST, SECOND):
        flight.start(key, ends_with(gate, ended))
    await asyncio.sleep(0)
    await flight.close()
    assert ended == [FIRST, SECOND]
    assert (len(flight), flight.rollouts) == (0, set())
    await flight.close()


async def test_the_error_of_a_group_comes_with_it() -> None:
    flight, gate = Flight(), asyncio.Event()
    flight.start(FIRST, ends_with(gate, [], RuntimeError("the store is gone")))
    gate.set()
    await flight.quiet()
    with pytest.raises(RuntimeError, match="the store is gone"):
        await flight.take()


async def flight_rests() -> None:
    for _ in range(5):
        await asyncio.sleep(0)
