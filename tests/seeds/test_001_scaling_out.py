"""The tutorial on scaling out: every program of it, with a dataset and an agent small enough for a test."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

import agentlightning as agl
from tests.seeds.parts import TASKS, MyCustomTracer, agent


def test_parallel_rollouts_with_the_trainer() -> None:
    trainer = agl.Trainer(
        algorithm=agl.Baseline(),
        n_runners=3,
        tracer=agl.OtelTracer(),
        adapter=agl.LlmProxyTraceToTriplet(),
        initial_resources={},
        strategy={"type": "cs", "server_port": 0},
    )
    trainer.fit(agent, train_dataset=TASKS, val_dataset=TASKS)
    assert trainer.result.rewards == [0.25, 0.75, 0.25, 0.75]


def test_training_through_verl_says_what_there_is_instead() -> None:
    with pytest.raises(AttributeError, match=r"agl\.GRPO"):
        agl.VERL({})  # type: ignore[attr-defined]


def test_rows_of_a_parquet_file_are_a_list() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    rows = datasets.Dataset.from_list(TASKS).to_list()
    trainer = agl.Trainer(algorithm=agl.Baseline(), strategy="shm", initial_resources={})
    trainer.fit(agent, train_dataset=rows)
    assert trainer.result.rewards == [0.25, 0.75]


def test_a_smoke_test_by_max_rollouts_and_dev() -> None:
    trainer = agl.Trainer(n_runners=1, max_rollouts=2, strategy="shm")
    trainer.dev(agent, TASKS)
    assert trainer.result.rewards == [0.25, 0.75]


STRATEGIES: list[Any] = [
    {"n_runners": 1, "strategy": "shm"},
    {"strategy": {"type": "shm", "n_runners": 8, "main_thread": "algorithm"}},
    {"strategy": agl.SharedMemoryExecutionStrategy(main_thread="algorithm", n_runners=4)},
    {"n_runners": 4, "strategy": "shm"},
]


@pytest.mark.parametrize(("settings", "count"), list(zip(STRATEGIES, (1, 8, 4, 4), strict=True)))
def test_every_form_of_the_shared_memory_strategy_runs(settings: dict[str, Any], count: int) -> None:
    trainer = agl.Trainer(algorithm=agl.Baseline(), initial_resources={}, **settings)
    assert trainer.n_runners == count
    trainer.fit(agent, train_dataset=TASKS)
    assert trainer.result.rewards == [0.25, 0.75]


def test_the_default_is_client_server_with_the_trainers_number() -> None:
    trainer = agl.Trainer(algorithm=agl.Baseline(), n_runners=8)
    assert type(trainer.strategy) is agl.ClientServerExecutionStrategy
    assert (trainer.strategy.n_runners, trainer.strategy.server_port) == (8, 4747)


def test_settings_of_client_server_in_a_dict() -> None:
    strategy: dict[str, Any] = {"type": "cs", "server_port": 9999}
    trainer = agl.Trainer(algorithm=agl.Baseline(), n_runners=8, strategy=strategy)
    assert isinstance(trainer.strategy, agl.ClientServerExecutionStrategy)
    assert (trainer.strategy.n_runners, trainer.strategy.server_port) == (8, 9999)
    strategy |= {"server_host": "0.0.0.0", "main_process": "runner"}
    trainer = agl.Trainer(algorithm=agl.Baseline(), n_runners=1, strategy=strategy)
    assert isinstance(trainer.strategy, agl.ClientServerExecutionStrategy)
    assert (trainer.strategy.server_host, trainer.strategy.main_process) == ("0.0.0.0", "runner")


def test_the_environment_configures_client_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "AGL_SERVER_PORT", "10000")
    monkeypatch.setitem(os.environ, "AGL_CURRENT_ROLE", "algorithm")
    monkeypatch.setitem(os.environ, "AGL_MANAGED_STORE", "0")
    store = agl.LightningStoreClient("http://127.0.0.1:10000")
    trainer = agl.Trainer(algorithm=agl.Baseline(), n_runners=8, strategy="cs", store=store)
    assert isinstance(trainer.strategy, agl.ClientServerExecutionStrategy)
    assert (trainer.strategy.server_port, trainer.strategy.role) == (10000, "algorithm")
    assert trainer.strategy.managed_store is False


def test_other_parts_by_class_path_and_settings() -> None:
    trainer = agl.Trainer(tracer="tests.seeds.parts.MyCustomTracer", adapter={"agent_match": "planner"})
    assert type(trainer.tracer) is MyCustomTracer
    assert type(trainer.adapter) is agl.TracerTraceToTriplet
    assert type(agl.Trainer(adapter="agentlightning.adapter.LlmProxyTraceToTriplet").adapter) is (
        agl.LlmProxyTraceToTriplet
    )


def test_an_algorithm_that_crashes_stops_the_runners_and_its_error_comes_out() -> None:
    @agl.algo
    async def crashes() -> None:
        raise OverflowError("crashed")

    with pytest.raises(OverflowError, match="crashed"):
        agl.Trainer(algorithm=crashes, n_runners=2, strategy={"type": "cs", "server_port": 0}).fit(agent)


def test_ctrl_c_ends_algorithm_and_runners() -> None:
    @agl.algo
    async def endless(*, store: agl.LightningStore) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await store.wait_for_rollout((await store.enqueue_rollout(1, metadata={"nobody": "runs this"})).rollout_id)

    with pytest.raises(KeyboardInterrupt):
        agl.Trainer(algorithm=endless, strategy="shm").fit(agent)


def test_shared_memory_opts_out_of_the_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_MANAGED_STORE", "0")
    trainer = agl.Trainer(algorithm=agl.Baseline(), strategy="shm", initial_resources={})
    assert isinstance(trainer.strategy, agl.SharedMemoryExecutionStrategy)
    assert trainer.strategy.managed_store is False


def test_the_runner_on_the_main_thread_has_room_for_one() -> None:
    with pytest.raises(ValueError, match=r"n_runners is 8\. Set n_runners=1, or main_thread='algorithm'"):
        agl.Trainer(strategy={"type": "shm", "n_runners": 8, "main_thread": "runner"})
