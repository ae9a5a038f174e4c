"""`fit` as a notebook calls it: inside a running event loop, with agents that are defined in cells."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from typing import Any

import pytest

import agentlightning as agl
from tests.stubs.processes import run_program
from tests.trainer.parts import run_tasks, tenth

STRATEGIES: dict[str, dict[str, Any]] = {
    "shm, one runner": {"strategy": "shm"},
    "shm, two runners": {"strategy": "shm", "n_runners": 2},
    "cs": {"strategy": {"type": "cs", "server_port": 0}, "n_runners": 2},
    "cs, runner here": {"strategy": {"type": "cs", "server_port": 0, "main_process": "runner"}},
}


@pytest.mark.parametrize("where", STRATEGIES)
def test_fit_runs_inside_a_running_loop_and_leaves_it_as_it_was(where: str) -> None:
    async def cell() -> None:
        ticking = asyncio.create_task(asyncio.sleep(0.01, "ticked"))
        here, task = asyncio.get_running_loop(), asyncio.current_task()
        trainer = agl.Trainer(algorithm=run_tasks, **STRATEGIES[where])
        for _ in range(2):
            trainer.fit(tenth, train_dataset=[1, 2])
            assert len(trainer.result) == 2
        assert trainer.evaluate(tenth, [5]).rewards == [0.5]
        assert (asyncio.get_running_loop(), asyncio.current_task(), asyncio.get_event_loop()) == (here, task, here)
        assert await ticking == "ticked"

    asyncio.run(cell())


@pytest.mark.parametrize("where", ["shm, one runner", "cs"])
def test_an_interrupt_ends_the_cell_and_not_the_session(where: str) -> None:
    class Endless(agl.Algorithm):
        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            os.kill(main, signal.SIGINT)
            await asyncio.Event().wait()

    async def session() -> str:
        with pytest.raises(KeyboardInterrupt):
            agl.Trainer(algorithm=Endless(), **STRATEGIES[where]).fit(tenth)
        return await asyncio.sleep(0, "goes on")

    main = os.getpid()
    assert asyncio.run(session()) == "goes on"


@pytest.mark.parametrize("in_a_cell", [False, True])
def test_what_fit_raises_has_no_other_error_before_it_in_a_script(in_a_cell: bool) -> None:
    @agl.algo
    def broken() -> None:
        raise OverflowError("too much")

    async def cell() -> None:
        agl.Trainer(algorithm=broken, strategy="shm").fit(tenth)

    with pytest.raises(OverflowError, match="too much") as raised:
        asyncio.run(cell()) if in_a_cell else agl.Trainer(algorithm=broken, strategy="shm").fit(tenth)
    assert in_a_cell or raised.value.__context__ is None


SESSION = """
import asyncio, sys
import __main__

CELLS = [
    "import agentlightning as agl",
    "@agl.rollout\\nasync def agent(task):\\n    return factor * task",
    "factor = 2.0",
    "trainer = agl.Trainer(algorithm='baseline', initial_resources={}, strategy=STRATEGY, n_runners=2)",
    "trainer.fit(agent, train_dataset=(n for n in range(3)))",
    "print(trainer.result.rewards)",
]

async def kernel():
    for cell in CELLS:
        exec(compile(cell, "<cell>", "exec"), __main__.__dict__)
        await asyncio.sleep(0)

STRATEGY = {strategy}
asyncio.run(kernel())
"""


def run_session(strategy: str) -> subprocess.CompletedProcess[str]:
    """Run the cells as a kernel does: in `__main__`, which has no file, inside one running loop."""
    return run_program("python", "-W", "error", "-c", SESSION.replace("{strategy}", strategy), code=None)


@pytest.mark.parametrize("strategy", ["'shm'", "{'type': 'cs', 'server_port': 0, 'start_method': 'fork'}"])
def test_agents_of_cells_run(strategy: str) -> None:
    done = run_session(strategy)
    assert (done.returncode, done.stdout) == (0, "[0.0, 2.0, 4.0]\n"), done.stderr


def test_agents_of_cells_that_would_have_to_be_imported_are_named_with_the_ways_out() -> None:
    done = run_session("{'type': 'cs', 'server_port': 0, 'start_method': 'spawn'}")
    assert done.returncode == 1
    assert "TypeError: start_method='spawn' starts child processes, which cannot import agent" in done.stderr
    assert "Move it into a module and import it from there, use strategy='shm'" in done.stderr
