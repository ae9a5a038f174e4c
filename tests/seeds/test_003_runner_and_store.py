"""The manual's chapters on runners and the store: their programs word for word."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional, TypeVar

import pytest

import agentlightning as agl
from agentlightning import runner as runners
from agentlightning.store import LightningStoreClient
from agentlightning.trainer.shorthand import TrainerLegacy
from agentlightning.types import Hook
from tests.seeds.parts import TASKS, agent, claimed, traced
from tests.seeds.shown import Shown
from tests.stubs.processes import Terminal

# --- runner ----------------------------------------------------------------------------------------------------------


@pytest.mark.snippet("003/runner-exports")
def test_what_the_package_of_runners_exports(shown: Shown) -> None:
    made = shown.run(__package__="agentlightning.runner")
    for name in made.__all__:
        assert getattr(made, name) is getattr(runners, name)


@pytest.mark.snippet("003/run-context")
async def test_a_runner_in_its_context(shown: Shown) -> None:
    store, runner = agl.InMemoryLightningStore(), agl.LitAgentRunner[Any](tracer=agl.OtelTracer(), max_rollouts=2)
    await store.add_resources({})
    ids = [(await store.enqueue_rollout(task)).rollout_id for task in TASKS]
    await shown.start(runner=runner, store=store, agent=agl.rollout(agent), hooks=[Hook()])
    done = await store.wait_for_rollouts(rollout_ids=ids, timeout=0)
    assert [rollout.status for rollout in done] == ["succeeded"] * 2
    with pytest.raises(ValueError, match=r"Call init\(\) first"):
        runner.get_agent()


@pytest.mark.snippet("003/accessors")
async def test_what_a_runner_knows(shown: Shown) -> None:
    task = TypeVar("task")
    listed = await shown.start(LitAgent=agl.LitAgent, LightningStore=agl.LightningStore, T_task=task)
    store, runner = agl.InMemoryLightningStore(), agl.LitAgentRunner[Any](tracer=agl.OtelTracer())
    for accessor in (listed.get_agent, listed.get_store):
        with pytest.raises(ValueError, match=r"Call init(_worker)?\(\) first"):
            accessor(runner)
    assert listed.get_worker_id(runner) == runner.get_worker_id() == "Worker-Unknown"
    with runner.run_context(agent=agl.rollout(agent), store=store):
        assert listed.get_worker_id(runner) == runner.get_worker_id() == "Worker-0"
        assert listed.get_agent(runner) is runner.get_agent()
        assert listed.get_store(runner) is runner.get_store() is store


@pytest.mark.snippet("003/log-prefix")
async def test_the_prefix_of_a_log_line(shown: Shown) -> None:
    assert (await shown.start(Optional=Optional))._log_prefix.__doc__
    runner = agl.LitAgentRunner[Any](tracer=agl.OtelTracer())
    with runner.run_context(agent=agl.rollout(agent), store=agl.InMemoryLightningStore()):
        assert runner._log_prefix("ro-1") == "[Worker-0] [ro-1]"


@pytest.mark.snippet("003/trainer-fields")
def test_the_fields_of_a_trainer(shown: Shown) -> None:
    types: dict[str, Any] = {"Optional": Optional, "Sequence": Sequence, "Hook": Hook, "Tracer": agl.Tracer}
    made = shown.run(TrainerLegacy=TrainerLegacy, ExecutionStrategy=agl.ExecutionStrategy, **types)
    assert issubclass(agl.Trainer, made.Trainer.__base__)
    trainer = agl.Trainer(strategy="shm")
    for name in made.Trainer.__annotations__:
        assert hasattr(trainer, name), name


BEFORE = """
import asyncio, sys, threading
import agentlightning as agl
from agentlightning import OtelTracer as AgentOpsTracer


class MyLitAgent(agl.LitAgent):
    def __init__(self):
        super().__init__()
        queueing = threading.Thread(target=lambda: asyncio.run(self.queue(vars(sys.modules["__main__"])["store"])))
        queueing.start()
        queueing.join()

    async def queue(self, store):
        await store.add_resources({})
        self.queued = [await store.enqueue_rollout(task) for task in "xyz"]

    def rollout(self, task, resources, rollout):
        print("ran", task)
        return 1.0


"""
"""Given by the text around the program: an agent, here one that has a queue of tasks."""


@pytest.mark.heavy
@pytest.mark.snippet(
    "003/standalone-runner", differs="the tracer is `OtelTracer`: `AgentOpsTracer` requires the extra `agentops`"
)
def test_a_runner_outside_of_the_trainer_runs_until_all_is_done(
    shown: Shown, terminal: Terminal, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(BEFORE + shown.module_text())
    output = terminal("python program.py", apart=True).succeeded()
    assert output.splitlines() == ["Running on Worker-0", "ran x", "ran y", "ran z"]


# --- store -----------------------------------------------------------------------------------------------------------


@pytest.mark.snippet("003/in-memory-store")
async def test_a_store_in_memory(shown: Shown) -> None:
    store = (await shown.start()).store
    assert (await store.enqueue_rollout("x")).status == "queuing"
    able = store.capabilities
    assert (able["async_safe"], able["thread_safe"]) == (True, True)
    assert (able["distributed"], able["persistence"]) == (False, False)


@pytest.mark.snippet("003/thread-safety")
async def test_a_store_made_safe_for_threads(shown: Shown) -> None:
    class OneThread(agl.InMemoryLightningStore):
        """A store that says it is for one thread."""

        @property
        def capabilities(self) -> agl.LightningStoreCapabilities:
            return {"thread_safe": False, "zero_copy": False}

    threaded = (await shown.start(store=OneThread())).threaded_store
    assert (threaded.capabilities["thread_safe"], threaded.capabilities["async_safe"]) == (True, True)
    made = [asyncio.to_thread(asyncio.run, threaded.enqueue_rollout(number)) for number in range(20)]
    await asyncio.gather(*made)
    assert sorted(rollout.input for rollout in await threaded.query_rollouts()) == list(range(20))
    await threaded.close()


@pytest.mark.snippet("003/atomic-write", instead="the storage backend of a store has no transactions for programs")
async def test_a_transaction_of_the_programs(shown: Shown) -> None:
    store = agl.InMemoryLightningStore()
    with shown.explains(AttributeError, r"await store\.update_resources\(resources_id, resources\)", "`?'?Backend"):
        await shown.start(store=store, update=None)


@pytest.mark.snippet("003/tracer-store")
async def test_a_tracer_with_its_store(shown: Shown) -> None:
    store = agl.InMemoryLightningStore()
    tracer = (await shown.start(store=store)).tracer
    ids = await claimed(store)
    await traced(lambda: agl.emit_reward(0.5), tracer, **ids)
    assert agl.find_final_reward(await store.query_spans(ids["rollout_id"])) == 0.5


@pytest.mark.snippet("003/basic-operations")
async def test_the_operations_of_a_store(shown: Shown) -> None:
    made = await shown.start()
    finished = await made.store.get_rollout_by_id(made.rollout.rollout_id)
    assert (finished.status, finished.attempt.metadata) == ("succeeded", {"response": {"answer": "42"}})


@pytest.mark.snippet("003/client-rollouts", differs="the client connects to a server on a port of the test")
async def test_rollouts_by_a_client(
    shown: Shown, server: agl.LightningStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.enqueue_rollout("x")

    def client_of_a_free_port(base_url: str) -> agl.LightningStoreClient:
        assert base_url == "http://localhost:45993"
        return LightningStoreClient(base_url=server.endpoint)

    monkeypatch.setattr(agl, "LightningStoreClient", client_of_a_free_port)
    made = await shown.start()
    assert [rollout.input for rollout in made.rollouts] == ["x"]
    await made.client.close()
