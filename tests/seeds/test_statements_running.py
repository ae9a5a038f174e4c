"""Statements of the documents about trainer, strategies, runners and hooks; the rows are in `statements/`."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.env_var import LightningEnvVar
from agentlightning.runner import LegacyAgentRunner
from agentlightning.store.threading import LightningStoreThreaded
from tests.seeds.parts import TASKS, agent, learns
from tests.seeds.test_003_first_agent import critic
from tests.stubs.model_server import ModelServer


def test_shared_memory_has_one_process_and_daemon_threads() -> None:
    places: list[tuple[int, bool]] = []

    def notes(task: int) -> float:
        places.append((os.getpid(), threading.current_thread().daemon))
        return 1.0

    agl.Trainer(strategy={"type": "shm", "n_runners": 2}).dev(notes, [1, 2, 3, 4])
    assert places == [(os.getpid(), True)] * 4


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


def test_as_many_agents_run_at_once_as_there_are_runners() -> None:
    all_of_them = threading.Barrier(8)

    def meets(task: Any) -> float:
        all_of_them.wait(30)
        return 1.0

    algorithm = agl.Baseline(max_queue_length=8)
    trainer = agl.Trainer(algorithm=algorithm, n_runners=8, strategy="shm", initial_resources={})
    trainer.fit(meets, list(range(8)))
    assert trainer.result.rewards == [1.0] * 8


def test_the_settings_of_client_server_are_those_of_the_documents() -> None:
    settings: dict[str, Any] = {
        "role": "both", "n_runners": 12, "graceful_timeout": 20.0, "terminate_timeout": 10.0,
        "main_process": "algorithm", "managed_store": True, "server_host": "127.0.0.1", "server_port": 4848,
    }  # fmt: skip
    strategy = agl.ClientServerExecutionStrategy(**settings)
    assert {name: getattr(strategy, name) for name in settings} == settings


def test_defaults_of_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = agl.ClientServerExecutionStrategy()
    assert (strategy.managed_store, strategy.role, strategy.server_port) == (True, "both", 4747)
    assert strategy.server_host == "127.0.0.1"
    names = {variable.name for variable in LightningEnvVar}
    assert {"AGENT_LIGHTNING_STORE_URL", "AGENT_LIGHTNING_OTLP_ENDPOINT"} <= names
    monkeypatch.setenv("AGL_MANAGED_STORE", "1")
    assert agl.ClientServerExecutionStrategy().managed_store is True


def test_the_settings_of_a_trainer_and_their_defaults() -> None:
    trainer = agl.Trainer()
    assert (trainer.n_runners, trainer.n_workers, trainer.max_rollouts) == (1, 1, None)
    assert (trainer.algorithm, trainer.reward_fn, trainer.port) == (None, None, None)
    assert type(trainer.runner) is agl.LitAgentRunner
    assert type(trainer.strategy) is agl.ClientServerExecutionStrategy


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


def test_the_wrapper_for_threads_keeps_what_the_store_can() -> None:
    inner = agl.InMemoryLightningStore()
    wrapped = LightningStoreThreaded(inner).capabilities
    assert wrapped == {**inner.capabilities, "thread_safe": True, "async_safe": True}


# --- runner ----------------------------------------------------------------------------------------------------------


async def test_a_runner_registers_its_worker_and_step_runs_one_task() -> None:
    store, runner = agl.InMemoryLightningStore(), agl.LitAgentRunner[Any](tracer=agl.OtelTracer())
    with runner.run_context(agent=agl.rollout(agent), store=store):
        assert (runner.agent, runner.store) == (runner.get_agent(), runner.get_store())
        assert runner.worker_id == 0
        done = await runner.step(TASKS[1], resources={})
        [worker] = await store.query_workers()
    assert (done.status, worker.status) == ("succeeded", "idle")
    [attempt] = await store.query_attempts(done.rollout_id)
    assert (attempt.worker_id, attempt.reward) == (worker.worker_id, 0.75)


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
