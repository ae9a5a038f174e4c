"""Statements of the documents about trainer, strategies, runners and hooks; the rows are in `statements/`."""

from __future__ import annotations

from typing import Any

import pytest

import agentlightning as agl
from agentlightning.runner import LegacyAgentRunner
from tests.seeds.parts import agent, learns
from tests.seeds.test_003_first_agent import critic
from tests.stubs.model_server import ModelServer


async def names_its_store(store: agl.LightningStore, worker_id: int, event: Any) -> None:
    """A runner bundle whose answer is the class of its store."""
    claim = await store.dequeue_rollout(worker_id="names", timeout=30)
    assert claim is not None
    await store.finish_rollout(claim.rollout_id, response=type(store).__name__)


async def reads_both(store: agl.LightningStore, event: Any) -> tuple[str, Any]:
    """An algorithm bundle that returns the class of its store and of its runner's."""
    made = await store.enqueue_rollout(1)
    await store.wait_for_rollouts(rollout_ids=[made.rollout_id], timeout=30)
    [attempt] = await store.query_attempts(made.rollout_id)
    return type(store).__name__, (attempt.metadata or {})["response"]


@pytest.mark.parametrize(
    ("strategy", "classes"),
    [
        (agl.SharedMemoryExecutionStrategy(), ("LightningStoreThreaded", "LightningStoreThreaded")),
        (
            agl.SharedMemoryExecutionStrategy(managed_store=False),
            ("InMemoryLightningStore", "InMemoryLightningStore"),
        ),
        (agl.ClientServerExecutionStrategy(server_port=0), ("LightningStoreServer", "LightningStoreClient")),
    ],
)
def test_the_strategy_wraps_the_store_of_both_bundles(strategy: Any, classes: tuple[str, str]) -> None:
    assert strategy.execute(reads_both, names_its_store, agl.InMemoryLightningStore()) == classes


def test_each_argument_that_the_documents_give_a_trainer_is_taken() -> None:
    store, tracer, hook = agl.InMemoryLightningStore(), agl.OtelTracer(), agl.Hook()
    strategy = agl.ClientServerExecutionStrategy(n_runners=3)
    trainer = agl.Trainer(
        algorithm=agl.Baseline(), runner=agl.LitAgentRunner, store=store, strategy=strategy, tracer=tracer,
        adapter=agl.TracerTraceToTriplet(), llm_proxy=None, hooks=[hook], initial_resources={}, port=None,
        n_runners=3, max_rollouts=5,
    )  # fmt: skip
    assert (trainer.store, trainer.strategy, trainer.tracer, trainer.n_runners) == (store, strategy, tracer, 3)
    assert list(trainer.hooks) == [hook]
    assert trainer.max_rollouts == 5


# --- runner ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_older_runner_has_the_attributes_of_the_manual() -> None:
    tracer, own = agl.OtelTracer(), agl.rollout(agent)
    client: Any = agl.AgentLightningClient("http://127.0.0.1:1")
    runner = LegacyAgentRunner(own, client, tracer, agl.TracerTraceToTriplet(), worker_id=3, max_tasks=5)
    assert (runner.agent, runner.client, runner.tracer, runner.max_tasks) == (own, client, tracer, 5)
    assert runner.worker_id in (3, "3")


def test_two_trainings_after_one_another_in_a_process_do_not_disturb_each_other() -> None:
    for _ in range(2):
        trainer = agl.Trainer(strategy="shm")
        learns(trainer, call="dev")


@pytest.mark.heavy
def test_a_prompt_of_the_system_is_tuned_and_sampling_parameters_are_not() -> None:
    resources: dict[str, Any] = {
        "system_prompt": agl.SystemPrompt(template="Answer {question}", engine="f-string"),
        "sampling": agl.SamplingParameters(temperature=0.5),
        "llm": agl.LLM(endpoint="http://127.0.0.1:1/v1", model="m"),
    }

    def counts(task: str, system_prompt: agl.SystemPrompt, sampling: agl.SamplingParameters) -> float:
        assert sampling.temperature == 0.5
        return float("Count" in system_prompt.format(question=task))

    with ModelServer(critic) as server:
        chat = agl.Chat(agl.LLM(endpoint=server.base_url, model="m"))
        trainer = agl.Trainer(algorithm=agl.APO(chat, beam_rounds=1), strategy="shm", initial_resources=resources)
        trainer.fit(counts, ["a", "b", "c", "d"], val_dataset=["e", "f"])
    assert list(trainer.result.best_templates) == ["system_prompt"]
    assert "Count the people" in trainer.result.best_prompt.template
