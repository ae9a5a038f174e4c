"""The guide to customising the Trainer: its programs word for word, and what its prose says around them."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.execution.base import ExecutionStrategy
from agentlightning.execution.shared_memory import SharedMemoryExecutionStrategy
from agentlightning.trainer import Trainer
from agentlightning.trainer.init_utils import build_component, instantiate_component
from tests.seeds.parts import TASKS, MyAlgo, MyCustomTracer, agent, learns
from tests.seeds.shown import Shown


@pytest.mark.heavy
@pytest.mark.snippet("004/runner-and-hooks")
def test_a_runner_and_a_hook_of_ones_own(shown: Shown, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = shown.run().trainer
    assert (trainer.n_runners, trainer.max_rollouts) == (4, 50)
    learns(trainer, call="dev")
    assert capfd.readouterr().out.count("🚀 rollout ro-") == 2


@pytest.mark.snippet("004/shared-memory")
def test_shared_memory_by_its_class(shown: Shown) -> None:
    trainer = shown.run().trainer
    assert type(trainer.strategy) is SharedMemoryExecutionStrategy
    assert trainer.n_runners == 2
    learns(trainer, call="dev")


@pytest.mark.snippet("004/custom-tracer")
def test_a_tracer_of_ones_own(shown: Shown) -> None:
    shown.project("myproject.tracing", MyCustomTracer=MyCustomTracer)
    assert type(shown.run().trainer.tracer) is MyCustomTracer
    assert type(Trainer(tracer=MyCustomTracer).tracer) is MyCustomTracer
    assert type(Trainer(tracer={"type": "myproject.tracing.MyCustomTracer"}).tracer) is MyCustomTracer
    assert type(Trainer().tracer) is agl.OtelTracer, "the default needs no vendor"


@pytest.mark.snippet("004/own-store", instead="the release has no Redis store")
def test_a_store_of_ones_own(shown: Shown) -> None:
    shown.project("myproject.algos", MyAlgo=MyAlgo)
    with shown.explains(ModuleNotFoundError, r"subclass of agl\.LightningStore", "SQLiteLightningStore"):
        shown.run()


def test_a_store_in_redis_by_its_name() -> None:
    with pytest.raises(ImportError, match=r"subclass of agl\.LightningStore"):
        from agentlightning import RedisLightningStore  # type: ignore[attr-defined]  # noqa: F401


def test_specs_in_all_their_forms() -> None:
    algorithm = MyAlgo()
    forms: list[Any] = [algorithm, MyAlgo, lambda: algorithm, "tests.seeds.parts.MyAlgo", {"type": MyAlgo}]
    assert [type(Trainer(algorithm=form).algorithm) for form in forms] == [MyAlgo] * 5
    assert Trainer(algorithm=algorithm).algorithm is algorithm
    assert type(instantiate_component(MyAlgo, {"n_epochs": 2})) is MyAlgo
    made = build_component({"type": "shm", "n_runners": 3}, expected_type=ExecutionStrategy, spec_name="strategy",
                           registry={"shm": SharedMemoryExecutionStrategy})  # fmt: skip
    assert isinstance(made, SharedMemoryExecutionStrategy)


def test_nothing_is_injected_into_an_algorithm_which_asks_for_what_it_needs_when_it_runs() -> None:
    class Asks(agl.FastAlgorithm):
        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> tuple[Any, Any]:
            return self.get_trainer().tracer, self.get_store()

    trainer = Trainer(algorithm=Asks, strategy="shm")
    trainer.fit(agent)
    assert trainer.result[0] is trainer.tracer

    class Wants(agl.FastAlgorithm):
        def __init__(self, store: Any) -> None:
            self.kept = store

    with pytest.raises(TypeError, match="Wants is missing required settings: store"):
        Trainer(algorithm=Wants)


def test_client_server_is_the_default_when_a_port_is_specified_and_when_none_is() -> None:
    strategy = Trainer(port=9999).strategy
    assert type(strategy) is agl.ClientServerExecutionStrategy
    assert strategy.server_port == 9999
    strategy = Trainer(algorithm=agl.Baseline(), n_runners=8).strategy
    assert type(strategy) is agl.ClientServerExecutionStrategy
    assert (strategy.n_runners, strategy.server_port) == (8, 4747)


class Composite(ExecutionStrategy):
    """A strategy that delegates to one of several, by what the environment says."""

    def execute(self, algorithm: Any, runner: Any, store: Any) -> Any:
        if os.environ.get("DEBUGGED"):
            return SharedMemoryExecutionStrategy(n_runners=2).execute(algorithm, runner, store)
        return agl.ClientServerExecutionStrategy(n_runners=2, server_port=0).execute(algorithm, runner, store)


@pytest.mark.parametrize("debugged", ["1", pytest.param("", marks=pytest.mark.heavy)])
@pytest.mark.parametrize("runner", [None, agl.LitAgentRunner(agl.OtelTracer())], ids=["default runner", "an instance"])
def test_a_strategy_that_delegates_to_others(debugged: str, runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEBUGGED", debugged)
    trainer = Trainer(strategy=Composite, runner=runner, n_runners=2, algorithm="baseline", initial_resources={})
    learns(trainer, TASKS * 3)
    learns(trainer)


def test_a_strategy_that_runs_more_workers_than_there_are_runners_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEBUGGED", "1")
    trainer = Trainer(strategy=Composite(), algorithm="baseline", initial_resources={})
    with pytest.raises(RuntimeError, match=r"would share one LitAgentRunner.*Trainer\(n_runners=\.\.\.\)"):
        trainer.fit(agent, train_dataset=TASKS)


def test_ctrl_c_in_a_strategy_that_was_delegated_to_ends_fit_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEBUGGED", "1")

    @agl.algo
    async def endless(*, store: agl.LightningStore) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        Trainer(strategy=Composite, n_runners=2, algorithm=endless).fit(agent)
