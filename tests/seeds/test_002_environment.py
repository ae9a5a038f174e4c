"""The guide to environment variables in production: its blocks word for word; each variable does what it says."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.env_var import LightningEnvVar
from agentlightning.errors import MissingExtraError
from agentlightning.store.client_server import API_AGL_PREFIX
from agentlightning.utils.env import resolve_bool_env_var, resolve_int_env_var, resolve_str_env_var
from agentlightning.utils.server_launcher import PythonServerLauncherArgs
from tests.seeds.parts import learns
from tests.seeds.shown import Shown, both_end, snippets
from tests.tracer.collector import Collector

GRPC = "port 4317 is for gRPC, which requires an extra; the program works with that extra or with port 4318"
ADDRESS = "the addresses of the cluster are replaced with those of the test"


@pytest.fixture
def store_url() -> Iterator[str]:
    args = PythonServerLauncherArgs(host="127.0.0.1", port=0, launch_mode="thread")
    server = agl.LightningStoreServer(agl.InMemoryLightningStore(), launcher_args=args)
    asyncio.run(server.start())
    yield server.endpoint
    asyncio.run(server.stop())


@pytest.fixture
def without_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the extra look absent, also where it is installed."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "grpc" else find_spec(name, *rest)
    )


def statuses(url: str) -> list[str]:
    async def kept() -> list[str]:
        client = agl.LightningStoreClient(url)
        try:
            return [rollout.status for rollout in await client.query_rollouts()]
        finally:
            await client.close()

    return asyncio.run(kept())


@pytest.mark.heavy
@pytest.mark.snippet("002/store-url", differs=ADDRESS)
def test_both_roles_use_the_store_that_the_environment_names(shown: Shown, store_url: str) -> None:
    shown.export(AGENT_LIGHTNING_STORE_URL=store_url)
    trainer = agl.Trainer(algorithm="baseline", n_runners=2, initial_resources={})
    learns(trainer)
    assert statuses(store_url) == ["succeeded", "succeeded"]


@pytest.mark.snippet("002/server-address")
def test_host_and_port_say_where_a_server_listens(shown: Shown) -> None:
    shown.export()
    strategy = agl.Trainer().strategy
    assert isinstance(strategy, agl.ClientServerExecutionStrategy)
    assert (strategy.server_host, strategy.server_port) == ("0.0.0.0", 4747)


@pytest.mark.heavy
def test_host_and_port_say_where_a_store_is_that_nobody_manages(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL_SERVER_HOST", "127.0.0.1")
    monkeypatch.setenv("AGL_SERVER_PORT", store_url.rpartition(":")[2])
    monkeypatch.setenv("AGL_MANAGED_STORE", "0")
    trainer = agl.Trainer(algorithm="baseline", n_runners=2, initial_resources={})
    learns(trainer)
    assert statuses(store_url) == ["succeeded", "succeeded"]


@pytest.mark.usefixtures("without_grpc")
@pytest.mark.snippet("002/collector", instead=GRPC)
def test_a_collector_that_speaks_grpc_is_told_when_the_trainer_is_made(shown: Shown) -> None:
    shown.export()
    with shown.explains(MissingExtraError, "http://otel-collector:4318", r"agl-framework\[otlp-grpc\]"):
        agl.Trainer(strategy="shm")
    with pytest.raises(MissingExtraError):
        agl.OtelTracer().init_worker(0, agl.InMemoryLightningStore())


TRAIN = """
import argparse
import agentlightning as agl
from tests.seeds.parts import TASKS, agent, learns

parser = argparse.ArgumentParser()
parser.add_argument("--external-store-address")
address = parser.parse_args().external_store_address
trainer = agl.Trainer(
    algorithm=agl.Baseline(), store=agl.LightningStoreClient(address), initial_resources={}, run_id="webshop"
)
trainer.fit(agent, train_dataset=TASKS)
print("role", trainer.strategy.role, "result", trainer.result)
"""


def check_nodes(shown: Shown, folder: Path, store_url: str) -> None:
    """Run the scripts of both nodes, one of which is the test's."""
    with Collector() as collector:
        here = {"http://mongo-store:4747": store_url, "http://otel-collector:4317": collector.url}
        both = {"002/algorithm-node": "train_my_agent", "002/runner-node": "run_rollouts"}
        scripts = {name: shown if name == shown.snippet.id else shown.beside(name) for name in both}
        both_end(*(script.script(folder / name, here, **{both[name]: TRAIN}) for name, script in scripts.items()))
    assert statuses(store_url) == ["succeeded", "succeeded"]


@pytest.mark.heavy
@pytest.mark.usefixtures("without_grpc")
@pytest.mark.snippet("002/algorithm-node", instead=GRPC)
def test_the_algorithm_on_a_node_of_its_own(shown: Shown, tmp_path: Path, store_url: str) -> None:
    with shown.explains(MissingExtraError, r"agl-framework\[otlp-grpc\]"):
        shown.export()
        agl.Trainer()
    for variable in shown.exports:
        shown.patch.delenv(variable)
    check_nodes(shown, tmp_path, store_url)


@pytest.mark.heavy
@pytest.mark.snippet("002/runner-node", differs=ADDRESS)
def test_runners_on_a_node_of_their_own(shown: Shown, tmp_path: Path, store_url: str) -> None:
    check_nodes(shown, tmp_path, store_url)


@pytest.mark.usefixtures("without_grpc")
@pytest.mark.snippet("002/dockerfile", instead=f"{GRPC}. The package on PyPI is agl-framework")
def test_an_image_with_the_variables_set(shown: Shown) -> None:
    shown.export()
    with shown.explains(MissingExtraError, r"agl-framework\[otlp-grpc\]"):
        agl.Trainer()


@pytest.mark.snippet("002/helpers")
def test_the_helpers_read_and_convert(shown: Shown) -> None:
    module = shown.run()
    assert (module.use_managed, module.store_url) == (True, "localhost:4747")
    shown.patch.setenv("AGL_MANAGED_STORE", "0")
    shown.patch.setenv("AGL_SERVER_HOST", "10.0.0.4")
    shown.patch.setenv("AGL_SERVER_PORT", "4848")
    module = shown.run()
    assert (module.use_managed, module.store_url) == (False, "10.0.0.4:4848")


RECIPE = Path(__file__).parents[2] / "contrib/recipes/webshop"


def test_the_recipe_sets_the_variables_of_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """`contrib/recipes/webshop/scripts/run_stack.sh` and `contrib/recipes/webshop/Dockerfile`, which it refers to."""
    dockerfile, *nodes = (
        Shown(snippets()[f"002/{name}"], monkeypatch) for name in ("dockerfile", "algorithm-node", "runner-node")
    )
    assert dockerfile.exports
    recipe = Shown(replace(dockerfile.snippet, text=(RECIPE / "Dockerfile").read_text()), monkeypatch)
    assert dockerfile.exports.items() <= recipe.exports.items()
    script = (RECIPE / "scripts/run_stack.sh").read_text()
    assert sorted(name for node in nodes for name in node.exports if name not in script) == []
    assert '--external-store-address "$AGENT_LIGHTNING_STORE_URL"' in script


# --- what the prose says -----------------------------------------------------------------------------------------


def test_a_store_that_is_given_comes_before_the_one_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_MANAGED_STORE", "0")
    monkeypatch.setenv("AGENT_LIGHTNING_STORE_URL", "http://127.0.0.1:2")
    store = agl.LightningStoreClient("http://127.0.0.1:1")
    assert agl.Trainer(store=store).store is store


def test_the_address_of_a_store_comes_before_host_and_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_MANAGED_STORE", "0")
    monkeypatch.setenv("AGL_SERVER_HOST", "10.0.0.4")
    store: Any = agl.Trainer().store
    assert store.server_address_root == "http://10.0.0.4:4747"
    monkeypatch.setenv("AGENT_LIGHTNING_STORE_URL", "http://127.0.0.1:2")
    store = agl.Trainer().store
    assert store.server_address_root == "http://127.0.0.1:2"
    assert isinstance(agl.Trainer(strategy="shm", store="memory").store, agl.InMemoryLightningStore)


def test_the_prefix_of_the_rest_api() -> None:
    assert API_AGL_PREFIX == "/agl"


@pytest.mark.parametrize("role", ["algorithm", "runner", "both"])
def test_the_roles(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_CURRENT_ROLE", role)
    strategy = agl.Trainer().strategy
    assert isinstance(strategy, agl.ClientServerExecutionStrategy)
    assert strategy.role == role
    assert not hasattr(agl.Trainer(strategy="shm").strategy, "role"), "shared memory is one process, whatever the role"


@pytest.mark.parametrize(("text", "value"), [("0", False), ("1", True), ("false", False), ("TRUE", True)])
def test_a_variable_that_is_true_or_false(text: str, value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_MANAGED_STORE", text)
    assert resolve_bool_env_var(LightningEnvVar.AGL_MANAGED_STORE, fallback=True) is value


@pytest.mark.parametrize("helper", [resolve_bool_env_var, resolve_str_env_var, resolve_int_env_var])
def test_a_variable_is_given_by_its_name(helper: Any) -> None:
    with pytest.raises(TypeError, match="LightningEnvVar"):
        helper(...)


WRONG: list[tuple[dict[str, str], str]] = [
    ({"AGL_CURRENT_ROLE": "worker"}, r"AGL_CURRENT_ROLE.* must be one of 'algorithm', 'runner', 'both'"),
    ({"AGL_MANAGED_STORE": "perhaps"}, "AGL_MANAGED_STORE must be one of"),
    ({"AGL_SERVER_PORT": "many"}, "AGL_SERVER_PORT must be an integer"),
    ({"AGL_MANAGED_STORE": "0"}, r"AGENT_LIGHTNING_STORE_URL, or AGL_SERVER_PORT"),
    ({"AGL_MANAGED_STORE": "0", "AGL_SERVER_PORT": "0"}, r"AGENT_LIGHTNING_STORE_URL, or AGL_SERVER_PORT"),
    (
        {"AGL_MANAGED_STORE": "0", "AGENT_LIGHTNING_STORE_URL": "mongodb://mongo-store:27017"},
        "AGENT_LIGHTNING_STORE_URL must be an http address",
    ),
    ({"AGENT_LIGHTNING_OTLP_ENDPOINT": "otel-collector"}, "AGENT_LIGHTNING_OTLP_ENDPOINT must be"),
]


@pytest.mark.parametrize(("variables", "message"), WRONG)
def test_a_wrong_value_names_the_variable(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        agl.Trainer()


def test_spans_go_to_a_collector_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_LIGHTNING_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    agl.Trainer(strategy="shm")
