"""The course of a run, without a strategy around it."""

from __future__ import annotations

import asyncio

from agentlightning.execution.events import ThreadingEvent
from agentlightning.execution.run.supervisor import INTERRUPTED, Supervision, TaskTeam
from agentlightning.utils.concurrency.interrupts import Interrupts


async def test_a_store_is_not_asked_for_open_work_once_the_run_is_stopped() -> None:
    """Who stops the run may have closed the store: that it answers no more is no failure of the run."""
    event = ThreadingEvent()

    async def stopped() -> None:
        await asyncio.sleep(0.01)  # the event has been looked at once by then
        event.set()

    async def count_open_work() -> int:
        raise ConnectionError("the store is closed")

    async def algorithm() -> str:
        await asyncio.sleep(0.2)
        return "done"

    supervision = Supervision(
        TaskTeam({"runner-0": stopped()}),
        event,
        Interrupts(asyncio.get_running_loop()),
        INTERRUPTED,
        INTERRUPTED,
        count_open_work=count_open_work,
    )
    assert await supervision.conduct(algorithm()) == "done"
