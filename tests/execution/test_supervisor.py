"""The course of a run, without a strategy around it."""

from __future__ import annotations

import asyncio
from typing import Any

from agentlightning.execution.base import OpenWork
from agentlightning.execution.events import ThreadingEvent
from agentlightning.execution.supervisor import INTERRUPTED, Supervision, TaskTeam
from agentlightning.store import InMemoryLightningStore
from agentlightning.utils.concurrency.interrupts import Interrupts
from tests.stubs.processes import run_program


async def test_a_store_is_not_asked_for_open_work_once_the_run_is_stopped() -> None:
    """The store may be closed by whoever stops the run: that it answers no more is no failure of the run."""
    event = ThreadingEvent()

    async def stopped() -> None:
        await asyncio.sleep(0.01)  # the event has been looked at once by then
        event.set()

    class Closed(InMemoryLightningStore):
        async def query_rollouts(self, **_: Any) -> Any:
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
        open_work=OpenWork(Closed()),
    )
    assert await supervision.conduct(algorithm()) == "done"


INTERRUPTED_PROGRAM = """
import asyncio, atexit, gc, os, signal
import agentlightning as agl

signal.signal(signal.SIGINT, signal.default_int_handler)
atexit.register(lambda: print("nothing left to walk over:", gc.get_freeze_count() > 0))

@agl.rollout
def agent(task: int) -> float:
    return 1.0

@agl.algo
async def interrupted(*, train_dataset: agl.Dataset[int]) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.Event().wait()

agl.Trainer(algorithm=interrupted, strategy="shm").fit(agent, train_dataset=[1])
"""


def test_an_interrupted_program_ends_without_a_collection_of_all_its_objects() -> None:
    """With torch, the collection at the interpreter's end takes seconds, on a busy machine many."""
    done = run_program("python", "-c", INTERRUPTED_PROGRAM, code=None)
    assert done.stdout == "nothing left to walk over: True\n", done.stderr
    assert "KeyboardInterrupt" in done.stderr
