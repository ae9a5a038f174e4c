"""`Trainer.fit_v0`: an agent works for a v0.1 server, in this process and in processes of its own."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.legacy import workers

pytestmark = pytest.mark.filterwarnings(
    "ignore:.* the deprecated v0.1 protocol:DeprecationWarning", "ignore:.*use of fork:DeprecationWarning"
)
RESOURCES = {"main_llm": agl.LLM(endpoint="http://127.0.0.1:1/v1", model="m")}


def doubles(task: int) -> float:
    """An agent."""
    return float(task * 2)


def dies(task: int) -> float:
    """An agent that ends its process."""
    os._exit(3)


@pytest.fixture
def server() -> Iterator[Any]:
    """A v0.1 server on a loop of its own: what makes it, and a way to call it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def call(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    async def make() -> agl.AgentLightningServer:
        made = agl.AgentLightningServer(port=0)
        await made.start()
        await made.update_resources(RESOURCES)
        return made

    served = call(make())
    yield served, call
    call(served.stop())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def results(served: Any, call: Any) -> list[float | None]:
    return sorted(rollout.final_reward for rollout in call(served.retrieve_completed_rollouts()))


def test_one_runner_works_in_this_process(server: Any) -> None:
    served, call = server
    for task in (1, 2):
        call(served.queue_task(task, mode="train"))
    trainer = agl.Trainer(max_rollouts=2)
    assert trainer.fit_v0(doubles, served.endpoint) is None
    assert results(served, call) == [2.0, 4.0]
    assert trainer.kill_orphaned_processes() == 0


@pytest.mark.heavy
def test_several_runners_are_processes_that_end_with_their_tasks(server: Any) -> None:
    served, call = server
    for task in range(4):
        call(served.queue_task(task, mode="train"))
    agl.Trainer(n_runners=2, max_rollouts=2).fit_v0(doubles, served.endpoint)
    assert results(served, call) == [0.0, 2.0, 4.0, 6.0]
    assert multiprocessing.active_children() == []


@pytest.mark.heavy
def test_a_worker_that_dies_ends_the_others_and_is_told_of(server: Any) -> None:
    served, call = server
    call(served.queue_task(1, mode="train"))
    with pytest.raises(agl.RunnerDiedError, match=r"AgentLightning-Worker-\d ended with exit code 3"):
        agl.Trainer(n_runners=2).fit_v0(dies, served.endpoint)
    assert multiprocessing.active_children() == []


@pytest.mark.heavy
def test_only_recorded_processes_are_killed() -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    stranger = subprocess.Popen(sleeper)
    context: Any = multiprocessing.get_context("spawn")
    own = context.Process(target=_sleep, name="AgentLightning-Worker-0", daemon=True)
    same_name = context.Process(target=_sleep, name="AgentLightning-Worker-1", daemon=True)
    own.start()
    same_name.start()
    workers._recorded.append(own)
    assert agl.Trainer.kill_orphaned_processes() == 1
    assert (own.is_alive(), same_name.is_alive(), stranger.poll()) == (False, True, None)
    assert agl.Trainer.kill_orphaned_processes() == 0
    same_name.kill()
    same_name.join()
    stranger.kill()
    stranger.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems fork no workers")
def test_a_forked_process_ends_no_workers_of_its_parent() -> None:
    context: Any = multiprocessing.get_context("fork")
    own = context.Process(target=_sleep, daemon=True)
    own.start()
    workers._recorded.append(own)
    child = context.Process(target=_exits_with_the_number_of_killed)
    child.start()
    child.join()
    assert (child.exitcode, own.is_alive()) == (0, True)
    assert agl.Trainer.kill_orphaned_processes() == 1


def _exits_with_the_number_of_killed() -> None:
    os._exit(agl.Trainer.kill_orphaned_processes())


def _sleep() -> None:
    threading.Event().wait(600)


def test_a_loader_of_local_tasks_is_a_client_too() -> None:
    loader = agl.DevTaskLoader([1, 2], RESOURCES)
    agl.Trainer(max_rollouts=3).fit_v0(doubles, loader)
    assert [rollout.final_reward for rollout in loader.rollouts] == [2.0, 4.0, 2.0]
    with pytest.raises(ValueError, match="n_runners must be 1, got 2"):
        agl.Trainer(n_runners=2).fit_v0(doubles, loader)


@pytest.mark.parametrize(
    ("trainer", "arguments", "said"),
    [
        ({}, {"train_data": [1, 2]}, r"for a dataset call fit\(agent, train_dataset=...\)\. Got list"),
        (
            {},
            {"train_data": "localhost:8000"},
            "http address such as http://host:8000; got 'localhost:8000'",
        ),
        ({}, {"train_data": "http://h:1", "dev_data": "http://h:2"}, "dev_data would have no effect"),
        ({"algorithm": "baseline"}, {"train_data": "http://h:1"}, r"an algorithm here needs fit\(agent"),
    ],
)
def test_what_fit_v0_cannot_do_is_told(trainer: Any, arguments: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        agl.Trainer(**trainer).fit_v0(doubles, **arguments)
