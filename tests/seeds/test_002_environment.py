"""The guide to environment variables in production: each variable does what it says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import agentlightning as agl
from agentlightning.env_var import LightningEnvVar
from agentlightning.store.client_server import API_AGL_PREFIX
from agentlightning.utils.env import resolve_bool_env_var, resolve_int_env_var, resolve_str_env_var
from agentlightning.utils.server_launcher import PythonServerLauncherArgs
from tests.seeds.parts import TASKS, agent


@pytest.fixture
def store_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A store server elsewhere, named in the environment as the guide says."""
    args = PythonServerLauncherArgs(host="127.0.0.1", port=0, launch_mode="thread")
    server = agl.LightningStoreServer(agl.InMemoryLightningStore(), launcher_args=args)
    asyncio.run(server.start())
    monkeypatch.setenv("AGL_MANAGED_STORE", "0")
    monkeypatch.setenv("AGENT_LIGHTNING_STORE_URL", server.endpoint)
    yield server.endpoint
    asyncio.run(server.stop())


def test_both_roles_use_the_store_that_the_environment_names(store_url: str) -> None:
    trainer = agl.Trainer(algorithm="baseline", n_runners=2, initial_resources={})
    trainer.fit(agent, train_dataset=TASKS)
    assert trainer.result.rewards == [0.25, 0.75]

    async def kept() -> list[str]:
        client = agl.LightningStoreClient(store_url)
        try:
            return [rollout.status for rollout in await client.query_rollouts()]
        finally:
            await client.close()

    assert asyncio.run(kept()) == ["succeeded", "succeeded"]


def test_a_store_that_is_given_comes_before_the_one_of_the_environment(store_url: str) -> None:
    store = agl.LightningStoreClient("http://127.0.0.1:1")
    assert agl.Trainer(store=store).store is store


def test_the_prefix_of_the_rest_api() -> None:
    assert API_AGL_PREFIX == "/agl"


@pytest.mark.parametrize("role", ["algorithm", "runner", "both"])
def test_the_roles(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_CURRENT_ROLE", role)
    strategy = agl.Trainer().strategy
    assert isinstance(strategy, agl.ClientServerExecutionStrategy)
    assert strategy.role == role
    assert not hasattr(agl.Trainer(strategy="shm").strategy, "role"), "shared memory is one process, whatever the role"


def test_a_role_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_CURRENT_ROLE", "worker")
    with pytest.raises(ValueError, match=r"AGL_CURRENT_ROLE.* must be one of 'algorithm', 'runner', 'both'"):
        agl.Trainer()


def test_host_and_port_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_SERVER_HOST", "0.0.0.0")
    monkeypatch.setenv("AGL_SERVER_PORT", "4848")
    strategy = agl.Trainer().strategy
    assert isinstance(strategy, agl.ClientServerExecutionStrategy)
    assert (strategy.server_host, strategy.server_port) == ("0.0.0.0", 4848)
    monkeypatch.delenv("AGL_SERVER_PORT")
    assert agl.ClientServerExecutionStrategy().server_port == 4747


@pytest.mark.parametrize(("text", "value"), [("0", False), ("1", True), ("false", False), ("TRUE", True)])
def test_the_helpers_read_and_convert(text: str, value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_MANAGED_STORE", text)
    assert resolve_bool_env_var(LightningEnvVar.AGL_MANAGED_STORE, fallback=True) is value
    host = resolve_str_env_var(LightningEnvVar.AGL_SERVER_HOST, fallback="localhost")
    assert f"{host}:{resolve_int_env_var(LightningEnvVar.AGL_SERVER_PORT, fallback=4747)}" == "localhost:4747"


def test_a_value_that_cannot_be_read_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_MANAGED_STORE", "perhaps")
    with pytest.raises(ValueError, match="AGL_MANAGED_STORE must be one of"):
        agl.Trainer()
    monkeypatch.setenv("AGL_MANAGED_STORE", "1")
    monkeypatch.setenv("AGL_SERVER_PORT", "many")
    with pytest.raises(ValueError, match="AGL_SERVER_PORT must be an integer"):
        agl.Trainer()


def test_the_address_of_a_store_is_an_http_address_also_where_mongodb_is_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AGL_MANAGED_STORE", "0")
    monkeypatch.setenv("AGENT_LIGHTNING_STORE_URL", "mongodb://mongo-store:27017")
    with pytest.raises(ValueError, match="AGENT_LIGHTNING_STORE_URL must be an http address"):
        agl.Trainer()


def test_an_unmanaged_store_without_an_address_is_refused_where_processes_would_not_share_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AGL_MANAGED_STORE", "0")
    with pytest.raises(ValueError, match="AGENT_LIGHTNING_STORE_URL"):
        agl.Trainer()


def test_spans_go_to_a_collector_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_LIGHTNING_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    agl.Trainer(strategy="shm")
    monkeypatch.setenv("AGENT_LIGHTNING_OTLP_ENDPOINT", "otel-collector")
    with pytest.raises(ValueError, match="AGENT_LIGHTNING_OTLP_ENDPOINT must be"):
        agl.Trainer(strategy="shm")
