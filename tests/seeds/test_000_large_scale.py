"""The guide to large runs: its programs run here, and where it is mistaken the error says what is right."""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import Any

import pytest

import agentlightning
from agentlightning.env_var import LightningEnvVar
from agentlightning.execution.client_server import ClientServerExecutionStrategy
from agentlightning.execution.shared_memory import SharedMemoryExecutionStrategy
from agentlightning.store.mongo import MongoLightningStore
from agentlightning.store.threading import LightningStoreThreaded
from agentlightning.trainer import Trainer
from agentlightning.trainer.registry import ExecutionStrategyRegistry
from tests.seeds.parts import TASKS, agent


def test_the_trainer_makes_strategy_store_and_runner_by_these_methods() -> None:
    assert list(inspect.signature(Trainer._make_strategy).parameters) == ["self", "strategy", "n_runners", "port"]
    assert list(inspect.signature(Trainer._make_store).parameters) == ["self", "store", "strategy"]
    assert list(inspect.signature(Trainer._make_runner).parameters) == ["self", "runner"]


def test_the_aliases_of_the_strategies_are_in_a_plain_registry() -> None:
    assert isinstance(ExecutionStrategyRegistry, dict)
    assert type(Trainer(strategy="shm").strategy) is SharedMemoryExecutionStrategy
    assert type(Trainer(strategy="cs").strategy) is ClientServerExecutionStrategy


def test_the_settings_of_the_shared_memory_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = SharedMemoryExecutionStrategy(n_runners=4, main_thread="algorithm")
    assert (strategy.n_runners, strategy.main_thread, strategy.managed_store) == (4, "algorithm", True)
    monkeypatch.setenv("AGL_MANAGED_STORE", "false")
    assert SharedMemoryExecutionStrategy().managed_store is False


def test_a_store_in_mongodb_keeps_a_run(mongo_uri: str) -> None:
    store = MongoLightningStore(uri=mongo_uri, database="agl_seed_000", thread_safe=True)
    trainer = Trainer(algorithm="baseline", store=store, strategy="shm", n_runners=2, initial_resources={})
    trainer.fit(agent, train_dataset=TASKS)
    asyncio.run(store.close())
    assert trainer.result.rewards == [0.25, 0.75]


def test_a_collection_of_its_own_is_a_partition(mongo_uri: str) -> None:
    with pytest.raises(TypeError, match=r"'collection'.*partition_id"):
        MongoLightningStore(uri=mongo_uri, database="agl", collection="spans", thread_safe=True)  # type: ignore[call-arg]


def test_the_wrappers_of_stores() -> None:
    capabilities = LightningStoreThreaded(agentlightning.InMemoryLightningStore()).capabilities
    assert capabilities.get("thread_safe")


def test_the_variables_of_the_table() -> None:
    named = ("AGL_MANAGED_STORE", "AGL_CURRENT_ROLE", "AGL_SERVER_HOST", "AGL_SERVER_PORT", "AGL_EMITTER_DEBUG")
    assert [LightningEnvVar[name].value for name in named] == list(named)


class BatchedAlgorithm(agentlightning.algorithm.FastAlgorithm):
    """The guide's algorithm: batches, awaited. The batches are its own; rollouts are run by runners."""

    async def run(self, train_dataset: Any, val_dataset: Any = None) -> list[str]:
        store, done = self.get_store(), list[str]()
        await store.add_resources({})
        async for batch in self._batches(train_dataset, size=8):
            made = [await store.enqueue_rollout(task) for task in batch]
            ended = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in made], timeout=30)
            done += [rollout.status for rollout in ended]
        return done

    async def _batches(self, dataset: Any, size: int) -> Any:
        for start in range(0, len(dataset), size):
            yield dataset[start : start + size]


@pytest.mark.parametrize("call", ["fit", "dev"])
def test_an_algorithm_in_batches(call: str) -> None:
    trainer = Trainer(algorithm=BatchedAlgorithm(), strategy="shm", n_runners=2)
    getattr(trainer, call)(agent, train_dataset=TASKS * 5)
    assert trainer.result == ["succeeded"] * 10


@pytest.mark.parametrize(
    ("attribute", "instead"),
    [("llm_proxy", r"get_llm_proxy\(\).*OpenAI client"), ("_batch", "batch_iter_over_dataset"), ("store", "get_store")],
)
def test_what_an_algorithm_is_thought_to_have_names_what_it_has(attribute: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=instead):
        getattr(BatchedAlgorithm(), attribute)


def test_dev_takes_fast_algorithms_only() -> None:
    class Slow(agentlightning.Algorithm):
        pass

    with pytest.raises(TypeError, match=r"requires an algorithm that inherits from FastAlgorithm.*Slow"):
        Trainer(algorithm=Slow(), strategy="shm").dev(agent, TASKS)


def test_metrics_are_recorded_elsewhere_than_in_a_store() -> None:
    with pytest.raises(AttributeError, match="metrics backend"):
        agentlightning.InMemoryLightningStore().record_metric  # type: ignore[attr-defined]  # noqa: B018 -- asked for


def test_the_configuration_for_production_is_made_as_shown() -> None:
    strategy = ClientServerExecutionStrategy(
        role="both",
        n_runners=12,
        graceful_timeout=20.0,
        terminate_timeout=10.0,
        main_process="algorithm",
        managed_store=True,
        server_host="0.0.0.0",
    )
    trainer = Trainer(algorithm=BatchedAlgorithm(), strategy=strategy, n_runners=12)
    assert trainer.strategy is strategy
    assert trainer.n_runners == 12


def test_a_node_that_has_both_roles_and_is_reachable_is_told_that_others_do_not_join_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AGL_CURRENT_ROLE", "both")
    monkeypatch.setenv("AGL_SERVER_HOST", "0.0.0.0")
    monkeypatch.setenv("AGL_SERVER_PORT", "0")
    monkeypatch.setenv("AGL_TOKEN", "a-token-of-this-test")
    with caplog.at_level(logging.WARNING, "agentlightning"):
        trainer = Trainer(algorithm="baseline", initial_resources={})
        trainer.fit(agent, train_dataset=TASKS)
    assert "another process with role='both' has a store of its own" in caplog.text
    assert trainer.result.rewards == [0.25, 0.75]
