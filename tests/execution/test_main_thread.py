"""A synchronous agent has the main thread of its runner's process, and a time limit ends what it does there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.store import LightningStore
from agentlightning.types import RolloutConfig
from tests.execution import fit_parts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

CS: dict[str, Any] = {"type": "cs", "server_port": 0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "shm": {"strategy": "shm"},
    "cs-fork": {"strategy": CS, "n_runners": 2},
    "cs-spawn": {"strategy": {**CS, "start_method": "spawn"}},
    "cs-runner-here": {"strategy": {**CS, "main_process": "runner"}},
    "process": {"strategy": "shm", "n_runners": 2, "runner": {"isolation": "process", "concurrency": 2}},
}

each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def trainer(layout: str, **settings: Any) -> agl.Trainer:
    return agl.Trainer(algorithm=fit_parts.ends_of, **LAYOUTS[layout], **settings)


@each_layout
def test_a_synchronous_agent_runs_on_the_main_thread_and_may_use_signals(layout: str) -> None:
    made = trainer(layout)
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGURG)]
    made.fit(fit_parts.rings, train_dataset=[1, 2])
    assert made.result == [["succeeded", None, 1.0]] * 2
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGURG)] == before


@each_layout
@pytest.mark.parametrize("call", ["sleep", "socket"])
def test_a_time_limit_breaks_off_a_system_call_of_the_agent(layout: str, call: str, tmp_path: Path) -> None:
    made = trainer(layout, rollout_config={"timeout_seconds": 0.3})
    made.fit(fit_parts.blocks, train_dataset=[str(tmp_path / call)])
    assert made.result == [["timeout", "timeout", None]]
    assert (tmp_path / call).read_text() == "Interrupted"


def test_the_error_of_a_time_limit_shows_where_the_agent_was(tmp_path: Path) -> None:
    made = trainer("shm", store=agl.InMemoryLightningStore(), rollout_config={"timeout_seconds": 0.3})
    made.fit(fit_parts.blocks, train_dataset=[str(tmp_path / "x")])
    [rollout] = asyncio.run(made.store.query_rollouts())
    attempt = asyncio.run(made.store.get_latest_attempt(rollout.rollout_id))
    assert attempt is not None
    assert attempt.error is not None
    assert "timeout_seconds=0.3" in attempt.error.message
    assert "time.sleep(600)" in (attempt.error.traceback or "")


@each_layout
def test_an_agent_that_ignores_the_interrupt_has_timed_out_and_the_next_one_has_the_main_thread(layout: str) -> None:
    made = trainer(layout, rollout_config={"timeout_seconds": 0.3})
    made.fit(fit_parts.swallows, train_dataset=[2, 0])
    assert made.result == [["timeout", "timeout", None], ["succeeded", None, 1.0]]


def test_an_agent_that_ignores_every_interrupt_leaves_the_others_threads(caplog: pytest.LogCaptureFixture) -> None:
    made = trainer("shm", rollout_config={"timeout_seconds": 0.3})
    with caplog.at_level(logging.WARNING, "agentlightning"):
        made.fit(fit_parts.swallows, train_dataset=[8, 0])
    assert made.result == [["timeout", "timeout", None], ["succeeded", None, 0.0]]
    assert "does not release the main thread; rollouts run in other threads" in caplog.text
    assert "press Ctrl+C to end the process" in caplog.text  # which waits for it at the end


@each_layout
def test_ctrl_c_ends_a_synchronous_agent_and_the_fit(layout: str, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        trainer(layout).fit(fit_parts.presses_ctrl_c, train_dataset=[(os.getpid(), str(tmp_path / "seen"))])
    assert (tmp_path / "seen").read_text() == "Interrupted"


def test_heartbeats_go_on_while_a_synchronous_agent_blocks_and_may_run_loops_of_its_own() -> None:
    store = agl.InMemoryLightningStore()

    @agl.rollout
    def agent(task: int) -> float:
        async def beats() -> set[Any]:
            return {worker.last_heartbeat_time for worker in await store.query_workers()}

        workers: set[Any] = set()
        for _ in range(3000):
            workers |= asyncio.run(beats())
            if len(workers) >= 3:
                return fit_parts.on_main_thread()
            threading.Event().wait(0.01)
        return -1.0

    made = trainer("shm", store=store, runner={"heartbeat_interval": 0.05, "interval_jitter": 0.0})
    made.fit(agent, train_dataset=[1])
    assert made.result == [["succeeded", None, 1.0]]


def synchronous(task: int) -> float:
    return fit_parts.on_main_thread()


async def asynchronous(task: int) -> float:
    return fit_parts.on_main_thread()


WHERE: dict[str, tuple[Any, dict[str, Any], float]] = {
    "an asynchronous agent, with the loop": (asynchronous, {}, 1.0),
    "a reward function": (lambda task: "answer", {"reward_fn": lambda output, task: fit_parts.on_main_thread()}, 1.0),
    "several runners": (synchronous, {"n_runners": 2}, 0.0),
    "several at once": (synchronous, {"runner": {"concurrency": 2}}, 0.0),
    "an algorithm there": (synchronous, {"strategy": {"type": "shm", "main_thread": "algorithm"}}, 0.0),
    "a fit in another thread": (synchronous, {}, 0.0),
}


@pytest.mark.parametrize("case", WHERE)
def test_what_has_the_main_thread_and_what_runs_in_others(case: str) -> None:
    agent, settings, has_it = WHERE[case]
    made = agl.Trainer(algorithm=fit_parts.ends_of, **{"strategy": "shm", **settings})
    if case == "a fit in another thread":
        asyncio.run(asyncio.to_thread(made.fit, agent, [1]))
    else:
        made.fit(agent, train_dataset=[1])
    assert made.result == [["succeeded", None, has_it]]


def test_of_an_agent_with_both_kinds_of_methods_the_synchronous_one_has_the_main_thread() -> None:
    made = agl.Trainer(algorithm="baseline", strategy="shm", initial_resources={})
    made.fit(fit_parts.Both(), train_dataset=[1], val_dataset=[2])
    assert made.result.rewards == [1.0, 0.0]


@pytest.mark.parametrize("layout", [{"n_runners": 2}, {"strategy": {"type": "shm", "main_thread": "algorithm"}}])
def test_ctrl_c_on_an_algorithm_beside_runner_threads_lets_them_finish_their_rollouts(layout: dict[str, Any]) -> None:
    store, cancelled = agl.InMemoryLightningStore(), threading.Event()

    @agl.algo
    async def waits(*, store: LightningStore) -> None:
        await store.add_resources({})
        for number in range(9):
            await store.enqueue_rollout(number)
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    @agl.rollout
    def agent(task: int) -> float:
        if task == 0:
            os.kill(os.getpid(), signal.SIGINT)
        assert cancelled.wait(20)
        return 1.0

    made = agl.Trainer(algorithm=waits, store=store, **{"strategy": "shm", **layout})
    with pytest.raises(KeyboardInterrupt):
        made.fit(agent)
    rollouts = asyncio.run(store.query_rollouts())
    begun = [rollout for rollout in rollouts if rollout.status != "requeuing"]  # returned to the queue before it began
    attempts = [a for r in begun if (a := asyncio.run(store.get_latest_attempt(r.rollout_id))) is not None]
    assert 1 <= len(attempts) <= made.n_runners
    assert {(attempt.status, attempt.outcome) for attempt in attempts} == {("succeeded", "scored")}


# --- a runner in a program of the user's -----------------------------------------------------------------------------


async def stepped(agent: Any, task: Any, *, event: Any = None, **settings: Any) -> list[Any]:
    """Run a task by `runner.step`; return the status of the attempt, and the reward."""
    store = agl.InMemoryLightningStore()
    with agl.LitAgentRunner[Any](agl.OtelTracer(), **settings).run_context(agent=agent, store=store) as runner:
        rollout = await runner.step(task, event=event)
    return [rollout.status, agl.find_final_reward(list(await store.query_spans(rollout.rollout_id)))]


async def served(agent: Any, *tasks: Any) -> list[str]:
    """Run tasks by `runner.iter`, with a time limit; return the statuses of their attempts."""
    store = agl.InMemoryLightningStore()
    made = [await store.enqueue_rollout(task, config=RolloutConfig(timeout_seconds=0.3)) for task in tasks]
    runner = agl.LitAgentRunner[Any](agl.OtelTracer(), max_rollouts=len(made))
    with runner.run_context(agent=agent, store=store):
        await runner.iter()
    attempts = [await store.get_latest_attempt(each.rollout_id) for each in made]
    return [attempt.status for attempt in attempts if attempt is not None]


def test_asyncio_run_of_a_step_runs_a_synchronous_agent_on_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGINT)
    assert asyncio.run(stepped(fit_parts.rings, 1)) == ["succeeded", 1.0]
    assert signal.getsignal(signal.SIGINT) is before


def test_such_an_agent_may_run_a_loop_of_its_own() -> None:
    @agl.rollout
    def agent(task: int) -> float:
        return asyncio.run(asyncio.sleep(0, fit_parts.on_main_thread()))

    assert asyncio.run(stepped(agent, 1)) == ["succeeded", 1.0]


def test_asyncio_run_of_iter_breaks_off_a_synchronous_agent_at_its_limit_also_one_that_ignores_it(
    tmp_path: Path,
) -> None:
    assert asyncio.run(served(fit_parts.blocks, str(tmp_path / "seen"))) == ["timeout"]
    assert (tmp_path / "seen").read_text() == "Interrupted"
    assert asyncio.run(served(fit_parts.swallows, 2, 0)) == ["timeout", "succeeded"]


def test_ctrl_c_during_a_step_ends_the_agent(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(stepped(fit_parts.presses_ctrl_c, (os.getpid(), str(tmp_path / "seen"))))
    assert (tmp_path / "seen").read_text() == "KeyboardInterrupt"


@pytest.mark.parametrize("needs", ["another task", "a server", "an event", "heartbeats on the loop", "several at once"])
def test_a_step_whose_loop_is_needed_runs_the_agent_in_a_thread(needs: str) -> None:
    async def program() -> list[Any]:
        settings: dict[str, Any] = {}
        async with contextlib.AsyncExitStack() as stack:
            if needs == "another task":
                other = asyncio.create_task(asyncio.sleep(600))
                stack.callback(other.cancel)
            elif needs == "a server":
                await stack.enter_async_context(await asyncio.start_server(lambda *_: None, "127.0.0.1", 0))
            elif needs == "an event":
                settings["event"] = threading.Event()
            elif needs == "heartbeats on the loop":
                settings["heartbeat_launch_mode"] = "asyncio"
            else:
                settings["concurrency"] = 2
            return await stepped(lambda task: fit_parts.on_main_thread(), 1, **settings)

    assert asyncio.run(program()) == ["succeeded", 0.0]
