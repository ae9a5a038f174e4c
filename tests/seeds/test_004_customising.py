"""The guide to customising the Trainer: its five programs, and the places where it is mistaken."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.execution.base import ExecutionStrategy
from agentlightning.execution.shared_memory import SharedMemoryExecutionStrategy
from agentlightning.runner import Runner
from agentlightning.runner.outcome import Ending
from agentlightning.trainer import Trainer
from agentlightning.trainer.init_utils import build_component, instantiate_component
from agentlightning.types import AttemptedRollout, Hook
from tests.seeds.parts import TASKS, MyAlgo, MyCustomTracer, agent


class LogRolloutStart(Hook):
    """As in the guide: a hook with fewer parameters than there are."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[str] = []

    async def on_rollout_start(self, rollout: Any) -> None:  # type: ignore[override]
        self.started.append(rollout.id)


class MyRunner(agl.LitAgentRunner[Any]):
    """What the guide's runner is meant to do: something of its own around every rollout."""

    served = 0

    async def _execute_rollout(self, rollout: AttemptedRollout) -> Ending:
        MyRunner.served += 1
        return await super()._execute_rollout(rollout)


def test_a_runner_and_a_hook_of_the_users() -> None:
    hook = LogRolloutStart()
    trainer = Trainer(
        runner=MyRunner,
        hooks=[hook],
        n_runners=4,
        max_rollouts=50,
        strategy="shm",
        algorithm="baseline",
        initial_resources={},
    )
    trainer.fit(agent, train_dataset=TASKS)
    assert trainer.result.rewards == [0.25, 0.75]
    assert MyRunner.served == len(hook.started) == 2
    assert all(started.startswith("ro-") for started in hook.started)


def test_a_runner_with_execute_is_told_what_to_override() -> None:
    class GuidesRunner(Runner[Any]):
        async def execute(self, task: Any) -> Any:
            return await super().execute(task)  # type: ignore[misc]

    with pytest.raises(TypeError, match=r"Nobody calls its execute\(\).*_execute_rollout\(rollout\), step or iter"):
        Trainer(runner=GuidesRunner, n_runners=4, max_rollouts=50, strategy="shm")


def test_shared_memory_by_its_class() -> None:
    trainer = Trainer(strategy=SharedMemoryExecutionStrategy, n_runners=2, algorithm=agl.Baseline, initial_resources={})
    trainer.fit(agent, train_dataset=TASKS)
    assert trainer.result.rewards == [0.25, 0.75]


@pytest.mark.parametrize("tracer", [MyCustomTracer, {"type": "tests.seeds.parts.MyCustomTracer"}])
def test_a_tracer_of_the_users(tracer: Any) -> None:
    trainer = Trainer(tracer=tracer)
    assert type(trainer.tracer) is MyCustomTracer
    assert type(Trainer().tracer) is agl.OtelTracer, "the default needs no vendor"


def test_a_subclass_that_makes_its_own_store() -> None:
    class MyTrainer(Trainer):
        def _make_store(self, store: Any, strategy: ExecutionStrategy) -> Any:
            assert isinstance(strategy, ExecutionStrategy)
            return agl.InMemoryLightningStore()

    trainer = MyTrainer(algorithm="tests.seeds.parts.MyAlgo", strategy="shm", initial_resources={})
    assert type(trainer.algorithm) is MyAlgo
    trainer.fit(agent, train_dataset=TASKS)
    assert trainer.result.rewards == [0.25, 0.75]
    assert asyncio.run(trainer.store.query_rollouts()).total == 2


def test_a_store_in_redis_is_an_example_of_a_store_that_users_write() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"subclass of agl\.LightningStore.*write-a-store"):
        from agentlightning.store.redis import RedisLightningStore  # type: ignore[import-not-found]
    with pytest.raises(ImportError, match=r"subclass of agl\.LightningStore"):
        from agentlightning import RedisLightningStore  # type: ignore[attr-defined]  # noqa: F401


def test_hooks_are_validated() -> None:
    assert Trainer(hooks=None).hooks == ()
    with pytest.raises(TypeError, match=r"hooks\[1\] is no Hook"):
        Trainer(hooks=[LogRolloutStart(), print])


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

    with pytest.raises(TypeError, match="Wants needs settings that are missing: store"):
        Trainer(algorithm=Wants)


def test_a_strategy_that_delegates_to_another() -> None:
    class Composite(ExecutionStrategy):
        runners_share_process = True

        def execute(self, algorithm: Any, runner: Any, store: Any) -> Any:
            return SharedMemoryExecutionStrategy(n_runners=2).execute(algorithm, runner, store)

    trainer = Trainer(strategy=Composite, n_runners=2, algorithm="baseline", initial_resources={})
    trainer.fit(agent, train_dataset=TASKS)
    assert trainer.result.rewards == [0.25, 0.75]
