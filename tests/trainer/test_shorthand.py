"""`configure` and `train`: what the constructor and `fit` do, in the words of the documents."""

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

TASKS = [{"wants": 0.25}, {"wants": 0.75}]


def agent(task: dict[str, float]) -> float:
    return task["wants"]


def trainer(**settings: Any) -> agl.Trainer:
    return agl.Trainer(strategy="shm", progress="none", **{"initial_resources": {}, **settings})


def test_configure_takes_any_setting_of_the_algorithm() -> None:
    made = trainer()
    made.configure("apo", epochs=7, beam_width=3)
    apo: Any = made.algorithm
    assert isinstance(apo, agl.APO)
    assert (apo.beam_rounds, apo.beam_width) == (7, 3)
    made.configure({"type": "apo", "seed": 5}, epochs=2)
    apo = made.algorithm
    assert (apo.beam_rounds, apo.seed) == (2, 5)
    made.configure(agl.Baseline)
    assert isinstance(made.algorithm, agl.Baseline)


def test_a_learning_rate_says_nothing_to_a_search_over_prompts(caplog: pytest.LogCaptureFixture) -> None:
    trainer().configure(algorithm="APO", lr=1e-3)
    assert "configure(lr=0.001) has no effect: APO does not train weights" in caplog.text


def test_configure_refuses_what_would_have_no_effect() -> None:
    made, algorithm = trainer(), agl.Baseline()
    with pytest.raises(TypeError, match=r"configure\(epochs\) would have no effect on .*Baseline"):
        made.configure(algorithm, epochs=2)
    made.configure(algorithm)
    with pytest.raises(TypeError, match="beam_wdth"):
        made.configure("apo", beam_wdth=2)
    with pytest.raises(ValueError, match="n_epochs and max_queue_length must be 1 or more"):
        made.configure("baseline", epochs=0)
    assert made.algorithm is algorithm


def test_train_judges_by_its_own_reward_function_this_once() -> None:
    def wants(task: dict[str, float]) -> dict[str, float]:
        return {"said": task["wants"]}

    def nothing(output: dict[str, float]) -> float:
        return 0.0

    def said(output: dict[str, float]) -> float:
        return output["said"]

    made = trainer(algorithm="baseline", reward_fn=nothing)
    assert made.train(wants, TASKS, reward_fn=said).rewards == [0.25, 0.75]
    made.fit(wants, TASKS)
    assert made.result.rewards == [0.0, 0.0]


class Selector(agl.Runner[Any]):
    """An agent that calls itself a runner."""

    def run(self, task: dict[str, float], context: dict[str, Any] | None = None) -> float:  # type: ignore[override]
        assert context is None
        return task["wants"]


def test_an_object_with_run_of_a_task_is_an_agent() -> None:
    made = trainer(algorithm="baseline")
    assert made.train(runner=Selector(), dataset=TASKS).rewards == [0.25, 0.75]
    with pytest.raises(TypeError, match=r"an object with run\(task, ...\); got .*LitAgentRunner"):
        made.train(runner=agl.LitAgentRunner[Any](tracer=agl.OtelTracer()), dataset=TASKS)
    with pytest.raises(TypeError, match="needs an agent"):
        trainer().train()
    with pytest.raises(ValueError, match=r"has no algorithm\. .* put an agl\.PromptTemplate"):
        trainer().train(runner=agent, dataset=TASKS)


@pytest.mark.parametrize(("count", "rounds"), [(100, 6), (16, 1), (3, 1), (1, 1)])
def test_iterations_bound_the_versions_that_are_made(count: int, rounds: int) -> None:
    search = agl.APO[Any]()
    own = search.with_iterations(count)
    assert own.beam_rounds == rounds
    assert own.beam_width * own.branch_factor * own.beam_rounds <= count
    assert search.beam_rounds == 3


@pytest.mark.parametrize("awaited", [False, True])
def test_iterations_are_the_passes_of_baseline_for_this_call_only(awaited: bool) -> None:
    made = trainer()
    made.configure(algorithm="Baseline", epochs=2)

    async def train(**settings: Any) -> Any:
        return await made.train(runner=agent, dataset=TASKS, **settings)

    def run(**settings: Any) -> Any:
        return asyncio.run(train(**settings)) if awaited else made.train(agent, TASKS, **settings)

    assert run(max_iterations=3).rewards == [0.25, 0.75] * 3
    result = run()
    assert result.rewards == [0.25, 0.75] * 2
    assert made.result is result


def test_iterations_are_the_steps_of_what_trains_weights() -> None:
    algorithms = agl.GRPO(model="m", max_steps=9), agl.PPO(model="m"), agl.SFT(model="m", min_reward=1.0)
    assert [algorithm.with_iterations(2).settings.max_steps for algorithm in algorithms] == [2, 2, 2]
    assert algorithms[0].settings.max_steps == 9


def test_iterations_of_an_algorithm_that_counts_none_are_ignored_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    @agl.algo
    def once(train_dataset: Any) -> int:
        return len(train_dataset)

    assert trainer(algorithm=once).train(agent, TASKS, max_iterations=100) == 2
    assert "max_iterations=100 has no effect: FunctionalAlgorithm has no such setting" in caplog.text
    with pytest.raises(ValueError, match="max_iterations must be a whole number of 1 or more; got 0"):
        trainer(algorithm=once).train(agent, TASKS, max_iterations=0)


pytestmark = pytest.mark.filterwarnings(
    "ignore:.* the deprecated v0.1 protocol:DeprecationWarning", "ignore:.*use of fork:DeprecationWarning"
)
RESOURCES = {"main_llm": agl.LLM(endpoint="http://127.0.0.1:1/v1", model="m")}


def doubles(task: int) -> float:
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
    with pytest.raises(ValueError, match="n_runners must be 1; got 2"):
        agl.Trainer(n_runners=2).fit_v0(doubles, loader)


@pytest.mark.parametrize(
    ("trainer", "arguments", "message"),
    [
        ({}, {"train_data": [1, 2]}, r"got list\. To use a dataset, call fit\(agent, train_dataset=...\)"),
        (
            {},
            {"train_data": "localhost:8000"},
            "http address such as http://host:8000; got 'localhost:8000'",
        ),
        ({}, {"train_data": "http://h:1", "dev_data": "http://h:2"}, "dev_data would have no effect"),
        ({"algorithm": "baseline"}, {"train_data": "http://h:1"}, r"To use one, call fit\(agent"),
    ],
)
def test_what_fit_v0_cannot_do_is_told(trainer: Any, arguments: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        agl.Trainer(**trainer).fit_v0(doubles, **arguments)
