"""The manual's chapter on the trainer: its programs word for word."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.execution.shared_memory import SharedMemoryExecutionStrategy
from agentlightning.trainer import registry
from tests.seeds.parts import TASKS, CustomStrategy, agent
from tests.seeds.shown import Shown


@pytest.mark.snippet("003/strategy-registry")
def test_the_registry_of_strategies(shown: Shown) -> None:
    assert shown.run().ExecutionStrategyRegistry.items() <= registry.ExecutionStrategyRegistry.items()
    assert type(agl.Trainer(strategy="shm").strategy) is SharedMemoryExecutionStrategy


@pytest.mark.snippet("003/grpo-by-name", instead="GRPO trains a model, so its name is required")
def test_grpo_by_its_name_alone(shown: Shown) -> None:
    runner = agl.LitAgentRunner[Any](tracer=agl.OtelTracer())
    with shown.explains(TypeError, "GRPO is missing required settings: model"):
        shown.run(runner=runner, reward_fn=lambda output, expected: 1.0)


@pytest.mark.heavy
@pytest.mark.snippet("003/custom-algorithm")
def test_an_algorithm_of_ones_own(shown: Shown) -> None:
    with shown.warns_of("n_workers"):
        made = shown.run(policy_update={"policy": 2}, rollout_fn=agent)
    assert made.trainer.result == {"policy": 2}


@pytest.mark.snippet("003/parallel-workers", instead="PPO trains a model, so its name is required")
def test_four_workers_in_shared_memory(shown: Shown) -> None:
    explanation = shown.explains(TypeError, "PPO is missing required settings: model")
    with pytest.warns(DeprecationWarning, match="n_workers"), explanation:
        shown.run(runner=agl.LitAgentRunner[Any](tracer=agl.OtelTracer()))
    with pytest.warns(DeprecationWarning, match="n_workers"):
        trainer = agl.Trainer(n_workers=4, execution_strategy="shm", algorithm="baseline", initial_resources={})
    trainer.fit(agent, TASKS)
    assert (trainer.n_workers, trainer.result.rewards) == (4, [0.25, 0.75])
    with pytest.raises(TypeError, match=r"train\(\) needs an agent: train\(runner=agent, dataset=tasks\)"):
        trainer.train()


@pytest.mark.snippet("003/agent-os-training", instead="GRPO trains a model, so its name is required")
def test_training_below_a_kernel(shown: Shown) -> None:
    """For the effect of such a kernel on a run see `tests/contrib/test_agentos.py`."""
    kernel = SimpleNamespace(on_violation=lambda callback: None)
    shown.project("agent_os", KernelSpace=lambda policy: kernel)
    shown.project("agent_os.policies", SQLPolicy=lambda deny: deny)
    with shown.explains(TypeError, "GRPO is missing required settings: model"):
        shown.run()


@pytest.mark.snippet("003/own-strategy")
def test_a_strategy_of_ones_own(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ExecutionStrategyRegistry", dict(registry.ExecutionStrategyRegistry))
    shown.project("mymodule", CustomExecutionStrategy=CustomStrategy)
    shown.run(ExecutionStrategyRegistry=registry.ExecutionStrategyRegistry)
    assert registry.ExecutionStrategyRegistry["custom"] == "mymodule.CustomExecutionStrategy"


def test_a_strategy_that_is_registered_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.ExecutionStrategyRegistry, "custom", "tests.seeds.parts.CustomStrategy")
    assert type(agl.Trainer(strategy="custom").strategy) is CustomStrategy


@pytest.mark.snippet("003/all-traces")
async def test_an_algorithm_that_reads_all_spans(shown: Shown) -> None:
    algorithm = (await shown.start(update="the update", LightningStore=agl.LightningStore)).my_algorithm
    store = agl.InMemoryLightningStore()
    runner = agl.LitAgentRunner[Any](tracer=agl.OtelTracer())
    async with runner.run_context(agent=agent, store=store):  # type: ignore[arg-type]  # pyright: ignore -- wrapped
        for task in TASKS:
            await runner.step(task, resources={})
    assert agl.find_final_reward(await store.traces.get_all()) == 0.75
    trainer = agl.Trainer(strategy="shm", algorithm=algorithm, store=store)
    trainer.fit(agent)
    assert trainer.result == "the update"
