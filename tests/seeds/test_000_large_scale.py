"""The guide to large runs: its programs word for word, and what its prose says around them."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import socket
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import prometheus_client
import pytest

import agentlightning
from agentlightning.env_var import LightningEnvVar, resolve_bool_env_var
from agentlightning.execution.client_server import ClientServerExecutionStrategy
from agentlightning.execution.shared_memory import SharedMemoryExecutionStrategy
from agentlightning.store.mongo import MongoLightningStore
from agentlightning.trainer import Trainer
from agentlightning.utils.metrics import ConsoleMetricsBackend
from tests.seeds.parts import TASKS, agent, learns
from tests.seeds.shown import Shown
from tests.stubs.model_server import ModelServer
from tests.stubs.ports import free_port


@pytest.mark.snippet("000/trainer-parts")
def test_the_trainer_makes_strategy_store_and_runner(shown: Shown) -> None:
    trainer = Trainer(n_runners=3)
    shown.run(self=trainer, strategy="shm", port=None, store=None, runner=None)
    assert type(trainer.strategy) is SharedMemoryExecutionStrategy
    assert trainer.strategy.n_runners == 3
    learns(trainer, call="dev")


@pytest.mark.snippet("000/shared-memory-settings")
def test_the_settings_of_the_shared_memory_strategy(shown: Shown) -> None:
    names = {"resolve_bool_env_var": resolve_bool_env_var, "LightningEnvVar": LightningEnvVar}
    settings = {"n_runners": 4, "main_thread": "algorithm", "managed_store": None}
    made = SharedMemoryExecutionStrategy(n_runners=4, main_thread="algorithm")
    read = SimpleNamespace()
    shown.run(self=read, **names, **settings)
    assert vars(read) == {name: getattr(made, name) for name in settings}
    shown.patch.setenv("AGL_MANAGED_STORE", "false")
    shown.run(self=read, **names, **settings)
    assert read.managed_store is SharedMemoryExecutionStrategy().managed_store is False


@pytest.mark.snippet("000/client-server-settings", instead="`...` represents arguments that the page omits")
def test_the_settings_of_the_client_server_strategy(shown: Shown) -> None:
    read = SimpleNamespace()
    with shown.explains(TypeError, "the first argument must be a variable, such as LightningEnvVar.AGL_MANAGED_STORE"):
        shown.run(self=read, resolved_role="both", n_runners=4, resolve_bool_env_var=resolve_bool_env_var)
    made = ClientServerExecutionStrategy(n_runners=4)
    assert (read.role, read.n_runners) == (made.role, made.n_runners)


@pytest.mark.snippet("000/mongo-store", differs="password and host, missing in the page, are added to the address")
def test_a_store_in_mongodb_as_shown(shown: Shown) -> None:
    with pytest.raises(agentlightning.BadRequestError, match=r"expected mongodb://user:password@host:27017"):
        shown.run()
    made: dict[str, Any] = {}
    exec(re.sub(r"\[email.protected\]", "secret@mongo", shown.text), made)
    store = made["store"]
    assert (store.database_name, store.capabilities["thread_safe"]) == ("agent_lightning", True)
    asyncio.run(store.close())


@pytest.mark.heavy
def test_a_store_in_mongodb_keeps_a_run(mongo_uri: str) -> None:
    store = MongoLightningStore(uri=mongo_uri, database="agl_seed_000", collection="spans", thread_safe=True)
    trainer = Trainer(algorithm="baseline", store=store, strategy="shm", n_runners=2, initial_resources={})
    trainer.fit(agent, train_dataset=TASKS)
    asyncio.run(store.close())
    assert trainer.result.rewards == [0.25, 0.75]


@pytest.mark.parametrize("call", ["fit", "dev"])
def test_an_algorithm_in_batches_of_rollouts(call: str) -> None:
    class InBatches(agentlightning.algorithm.FastAlgorithm):
        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> list[list[str]]:
            store, done = self.get_store(), list[list[str]]()
            await store.add_resources({})
            async for batch in self._batch(train_dataset, size=8):
                made = [await store.enqueue_rollout(task) for task in batch]
                ids = [rollout.rollout_id for rollout in made]
                done.append([rollout.status for rollout in await store.wait_for_rollouts(rollout_ids=ids, timeout=30)])
            return done

    trainer = Trainer(algorithm=InBatches(), strategy="shm", n_runners=2)
    getattr(trainer, call)(agent, train_dataset=TASKS * 5)
    assert trainer.result == [["succeeded"] * 8, ["succeeded"] * 2]


@pytest.mark.snippet("000/batched-algorithm")
def test_an_algorithm_that_asks_the_model_in_batches(shown: Shown) -> None:
    algorithm = shown.run(agentlightning=agentlightning).BatchedLLMAlgorithm
    tasks = [f"task {number}" for number in range(10)]
    with ModelServer() as model:
        proxy = agentlightning.LLMProxy(model_list=[model.entry("policy")])
        trainer = Trainer(algorithm=algorithm, llm_proxy=proxy, strategy="shm")
        trainer.fit(agent, train_dataset=tasks)
        prompts = [call.request["messages"][0]["content"] for call in model.calls]
    assert sorted(prompts[:8]) == sorted(tasks[:8])
    assert sorted(prompts[8:]) == sorted(tasks[8:])
    assert [rollout.status for rollout in asyncio.run(_rollouts(trainer.store))] == ["succeeded"] * 10


async def _rollouts(store: agentlightning.LightningStore) -> list[agentlightning.Rollout]:
    return list(await store.query_rollouts())


@pytest.mark.parametrize(
    ("settings", "tasks", "message"),
    [
        ({}, ["a"], "no gateway is set: pass llm_proxy= to the Trainer"),
        ({"llm_proxy": agentlightning.LLMProxy()}, [{"question": 1}], "entry 0 of the batch must be a string"),
        ({"llm_proxy": agentlightning.LLMProxy()}, None, "no dataset was given to fit"),
    ],
)
def test_what_such_an_algorithm_lacks_is_said(settings: dict[str, Any], tasks: Any, message: str) -> None:
    class Asks(agentlightning.algorithm.FastAlgorithm):
        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            async for batch in self._batch(train_dataset, size=8):
                await self.llm_proxy.batch_query(batch)

    with pytest.raises((ValueError, AttributeError), match=message):
        Trainer(algorithm=Asks(), strategy="shm", **settings).fit(agent, train_dataset=tasks)


@pytest.mark.parametrize("strategy", ["shm", "cs"])
@pytest.mark.snippet("000/minimal-adapter")
def test_metrics_at_the_end_of_a_trace_as_shown(shown: Shown, strategy: str) -> None:
    tracer = agentlightning.OtelTracer()
    tracer.add_observer(shown.run(agentlightning=agentlightning).MinimalAdapter())
    count = partial(prometheus_client.REGISTRY.get_sample_value, "rollout_latency_count", {"status": "ok"})
    before = count() or 0.0
    spec: dict[str, Any] = {"type": strategy} | ({"server_port": 0} if strategy == "cs" else {})
    store = agentlightning.InMemoryLightningStore()
    trainer = Trainer(algorithm="baseline", strategy=spec, store=store, tracer=tracer, initial_resources={})
    trainer.fit(agent, train_dataset=TASKS)
    spans = asyncio.run(store.statistics())["total_spans"]
    assert (count() or 0.0) - before == spans > 0


async def test_the_page_of_a_store_shows_the_metrics_of_programs(
    server: agentlightning.LightningStoreServer, client: agentlightning.LightningStoreClient
) -> None:
    await client.record_metric("seen.on_page", 2.0, {"kind": "x"})
    page = await asyncio.to_thread(lambda: urlopen(f"{server.endpoint}/v1/prometheus", timeout=30).read().decode())
    assert 'seen_on_page_sum{kind="x"} 2.0' in page


def test_metrics_at_the_end_of_a_trace_by_the_hook_that_the_text_names(caplog: pytest.LogCaptureFixture) -> None:
    metrics = ConsoleMetricsBackend()
    metrics.register_histogram("rollout_latency", ["status"])

    class Metrics(agentlightning.Hook):
        async def on_rollout_end(self, rollout: Any, spans: list[agentlightning.Span]) -> None:  # type: ignore[override]
            failed = any(span.status.status_code == "ERROR" for span in spans)
            seconds = max(span.end_time or 0.0 for span in spans) - rollout.start_time
            await metrics.observe_histogram("rollout_latency", seconds, {"status": "error" if failed else "ok"})

    with caplog.at_level(logging.INFO, "agentlightning"):
        Trainer(strategy="shm", hooks=[Metrics()]).dev(agent, TASKS)
        metrics.close()
    assert "rollout_latency" in caplog.text


@pytest.mark.heavy
@pytest.mark.snippet("000/multi-process-training", differs="`AGL_TOKEN` is set; port and MongoDB server of the test")
def test_the_configuration_for_many_processes(shown: Shown, mongo_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_TOKEN", "a-token-for-this-test-alone")
    monkeypatch.setenv("AGL_SERVER_PORT", str(free_port()))
    lookup, server = socket.getaddrinfo, urlsplit(mongo_uri)

    def look_up(host: Any, port: Any, *rest: Any, **more: Any) -> Any:  # `mongo` is the machine of the test
        here = (server.hostname, server.port or 27017) if host == "mongo" else (host, port)
        return lookup(*here, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    made = shown.run(MyAsyncAlgorithm=agentlightning.Baseline)
    assert made.trainer.strategy is made.strategy
    learns(made.trainer)
    asyncio.run(made.store.close())


TRAIN = """
import agentlightning as agl
from tests.seeds.parts import TASKS, agent, learns

trainer = agl.Trainer(algorithm="baseline", initial_resources={})
trainer.fit(agent, train_dataset=TASKS)
print("result", trainer.result)
"""


@pytest.mark.heavy
@pytest.mark.snippet("000/slurm", differs="`AGL_TOKEN` is set; port and `hostname` of the test")
def test_the_script_for_a_cluster(shown: Shown, tmp_path: Path) -> None:
    commands = tmp_path / "commands"
    commands.mkdir()
    (commands / "hostname").write_text("#!/bin/sh\necho 0.0.0.0\n")  # as on a node: an address that others reach
    (commands / "hostname").chmod(0o755)
    shown.named({"4747": str(free_port())})

    first = shown.script(tmp_path, train=TRAIN)
    first.ended(60)
    refused = first.said.strip().splitlines()[-1]
    assert "AGL_TOKEN" in refused
    shown.tells(refused, "error without `AGL_TOKEN`:")
    shown.patch.setenv("AGL_TOKEN", "a-token-for-this-test-alone")
    assert "result 2 rollouts (2 scored), mean reward 0.500" in shown.script(tmp_path).succeeded()


# --- what the prose says -----------------------------------------------------------------------------------------


def test_the_methods_that_make_the_parts_may_be_overridden() -> None:
    assert list(inspect.signature(Trainer._make_strategy).parameters) == ["self", "strategy", "n_runners", "port"]
    assert list(inspect.signature(Trainer._make_store).parameters) == ["self", "store", "strategy"]
    assert list(inspect.signature(Trainer._make_runner).parameters) == ["self", "runner"]


def test_the_variables_of_the_table() -> None:
    named = ("AGL_MANAGED_STORE", "AGL_CURRENT_ROLE", "AGL_SERVER_HOST", "AGL_SERVER_PORT", "AGL_EMITTER_DEBUG")
    assert [LightningEnvVar[name].value for name in named] == list(named)


def test_dev_takes_fast_algorithms_only() -> None:
    class Slow(agentlightning.Algorithm):
        pass

    with pytest.raises(TypeError, match=r"requires an algorithm that inherits from FastAlgorithm.*Slow"):
        Trainer(algorithm=Slow(), strategy="shm").dev(agent, TASKS)


@pytest.mark.parametrize(("attribute", "instead"), [("_batch", "batch_iter_over_dataset"), ("store", "get_store")])
def test_what_an_algorithm_is_thought_to_have_names_what_it_has(attribute: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=instead):
        getattr(agentlightning.Algorithm(), attribute)


def test_a_metric_is_recorded_on_an_event_loop() -> None:
    with pytest.raises(RuntimeError, match=r"asyncio\.run\(store\.observe_metric"):
        agentlightning.InMemoryLightningStore().record_metric("x", 1.0)


@pytest.mark.heavy
def test_one_node_that_has_both_roles_and_is_reachable_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_CURRENT_ROLE", "both")
    monkeypatch.setenv("AGL_SERVER_HOST", "0.0.0.0")
    monkeypatch.setenv("AGL_SERVER_PORT", "0")
    monkeypatch.setenv("AGL_TOKEN", "a-token-of-this-test")
    trainer = Trainer(algorithm="baseline", initial_resources={})
    learns(trainer)
