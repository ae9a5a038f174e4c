"""LLMProxy as its owner uses it: construction, resources, life, models."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest

from agentlightning.llm_proxy import LLMProxy
from agentlightning.store.base import LightningStore
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer import mirror
from agentlightning.types import LLM, ProxyLLM
from agentlightning.types.attempt_key import judge_key
from agentlightning.utils.server_launcher import PythonServerLauncherArgs
from tests.llm_proxy.harness import GatewayHarness
from tests.stubs.model_server import ModelServer
from tests.tracer.collector import Collector


def entry(name: str = "policy", **parameters: Any) -> Any:
    parameters = {"model": name, "api_base": "http://127.0.0.1:8000/v1", **parameters}
    return {"model_name": name, "litellm_params": parameters}


# --- resources ---------------------------------------------------------------------------------------------------


def test_an_attempts_resource_is_a_plain_llm_under_its_own_url() -> None:
    proxy = LLMProxy(port=4100, model_list=[entry()])
    llm = proxy.as_resource("ro-1", "at-1", sampling_parameters={"temperature": 0.5})
    assert llm == LLM(
        endpoint="http://127.0.0.1:4100/rollout/ro-1/attempt/at-1",
        model="policy",
        sampling_parameters={"temperature": 0.5},
    )


def test_without_ids_the_resource_is_made_each_attempts_own_later() -> None:
    llm = LLMProxy(port=4100, model_list=[entry()]).as_resource()
    assert isinstance(llm, ProxyLLM)
    assert llm.get_base_url("ro-1", "at-1") == "http://127.0.0.1:4100/rollout/ro-1/attempt/at-1"


def test_with_a_token_the_resource_of_an_attempt_has_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_TOKEN", "s3cret")
    llm = LLMProxy(port=4100, model_list=[entry()]).as_resource("ro-1", "at-1")
    assert judge_key(llm.api_key, "ro-1", "at-1", "s3cret") == "ok"


def test_one_id_alone_is_an_error() -> None:
    with pytest.raises(ValueError, match="Either rollout_id and attempt_id must be provided, or neither"):
        LLMProxy(port=4100, model_list=[entry()]).as_resource("ro-1")


def test_the_model_may_be_left_out_when_there_is_one_name() -> None:
    two_replicas = [entry(), entry(api_base="http://127.0.0.1:8001/v1")]
    assert LLMProxy(port=4100, model_list=two_replicas).as_resource().model == "policy"
    with pytest.raises(ValueError, match="No models found in model_list"):
        LLMProxy(port=4100).as_resource()
    with pytest.raises(ValueError, match=r"Multiple models found in model_list: a, b\. Please specify the model"):
        LLMProxy(port=4100, model_list=[entry("a"), entry("b")]).as_resource()
    assert LLMProxy(port=4100, model_list=[entry("a"), entry("b")]).as_resource(model="b").model == "b"


async def test_an_address_given_out_before_the_start_is_the_one_that_is_served() -> None:
    store = InMemoryLightningStore()
    async with ModelServer() as model:
        proxy = LLMProxy(model_list=[model.entry("policy")], store=store)
        before = proxy.as_resource().__dict__["endpoint"]
        await proxy.start()
        assert proxy.as_resource().__dict__["endpoint"] == before
        await proxy.stop()


# --- arguments ---------------------------------------------------------------------------------------------------

NO_EFFECT: dict[str, Any] = {
    "litellm_config": {"litellm_settings": {"drop_params": True}},
    "middlewares": ["rollout_attempt"],
    "callbacks": ["return_token_ids"],
    "num_workers": 2,
    "num_retries": -1,
    "launch_mode": "mp",
}


@pytest.mark.parametrize("name", NO_EFFECT)
def test_an_argument_that_would_have_no_effect_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        LLMProxy(**{name: NO_EFFECT[name]})


def test_launcher_args_stand_alone() -> None:
    args = PythonServerLauncherArgs(port=4100, launch_mode="thread")
    assert LLMProxy(launcher_args=args).server_launcher_args is args
    with pytest.raises(ValueError, match="cannot be set when launcher_args is provided"):
        LLMProxy(port=1, launcher_args=args)


BAD_ENTRIES: dict[str, tuple[Any, str]] = {
    "no dict": ("policy", r"model_list\[1\] must be a dict; got str"),
    "no name": ({"litellm_params": {}}, r"model_list\[1\].model_name is missing"),
    "no parameters": ({"model_name": "m"}, r"model_list\[1\].litellm_params must be a dict"),
    "no address": (entry(api_base=None), r"litellm_params.api_base is missing"),
    "odd address": (entry(api_base="127.0.0.1:8000"), r"api_base must be a URL such as http://127"),
    "misspelt": (entry(api_bsae="x"), r"litellm_params.api_bsae is not supported; did you mean 'api_base'\?"),
    "not honoured": (entry(rpm=3), r"litellm_params.rpm is not supported; known: model, api_base, api_key"),
    "empty key": (entry(api_key=""), r"api_key must be a non-empty string"),
}


@pytest.mark.parametrize("case", BAD_ENTRIES)
def test_a_malformed_entry_is_refused_by_place_and_changes_nothing(case: str) -> None:
    bad, message = BAD_ENTRIES[case]
    proxy = LLMProxy(model_list=[entry()])
    with pytest.raises(ValueError, match=message):
        proxy.update_model_list([entry(), bad])
    assert proxy.model_list == [entry()]


@pytest.mark.parametrize(("model", "sent"), [("hosted_vllm/a/b", "a/b"), ("openai/x", "x"), ("Qwen/Q3", "Qwen/Q3")])
async def test_the_model_server_gets_its_own_name_for_the_model(harness: GatewayHarness, model: str, sent: str) -> None:
    harness.proxy.update_model_list([harness.model.entry("policy", model=model)])
    await harness.ask()
    assert harness.model.calls[0].request["model"] == sent


# --- life --------------------------------------------------------------------------------------------------------


async def test_it_leaves_no_port_and_no_thread_behind() -> None:
    proxy = LLMProxy(model_list=[entry()], store=InMemoryLightningStore())
    await proxy.start()
    port = proxy.server_launcher.port
    assert proxy.is_running()
    await proxy.stop()
    assert not proxy.is_running()
    assert "agl-server" not in [thread.name for thread in threading.enumerate()]
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


async def test_a_restart_serves_the_same_address(harness: GatewayHarness) -> None:
    url = harness.url()
    await harness.proxy.restart()
    assert harness.url() == url
    assert (await harness.ask())[0] == 200


async def test_a_store_is_needed_to_start() -> None:
    with pytest.raises(ValueError, match=r"Store is not set\. Please set the store before starting the LLMProxy"):
        await LLMProxy(model_list=[entry()]).start()


async def test_a_store_can_be_changed_while_serving(harness: GatewayHarness) -> None:
    assert (await harness.ask())[0] == 200
    harness.store = InMemoryLightningStore()
    harness.proxy.set_store(harness.store)
    attempt = await harness.attempt()
    assert (await harness.ask(of=attempt))[0] == 200
    assert await harness.states(attempt) == ["ok"]
    assert harness.proxy.get_store() is harness.store


@pytest.mark.parametrize(("launch_mode", "text"), [("thread", "not thread-safe"), ("asyncio", "not async-safe")])
async def test_a_store_that_cannot_be_called_from_the_serving_loop_is_refused(launch_mode: Any, text: str) -> None:
    proxy = LLMProxy(model_list=[entry()], store=LightningStore(), launch_mode=launch_mode)
    with pytest.raises(RuntimeError, match=f"The store LightningStore is {text}, so the gateway"):
        await proxy.start()
    assert not proxy.is_running()


async def test_a_second_start_is_refused_and_a_second_stop_only_warns(
    harness: GatewayHarness, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RuntimeError, match="already running"):
        await harness.proxy.start()
    assert (await harness.ask())[0] == 200
    await harness.proxy.stop()
    await harness.proxy.stop()
    assert [record.getMessage() for record in caplog.records] == ["LLMProxy.stop: the gateway is not running"]


async def test_beyond_loopback_it_needs_a_token() -> None:
    proxy = LLMProxy(model_list=[entry()], store=InMemoryLightningStore(), host="0.0.0.0")
    with pytest.raises(RuntimeError, match=r"0\.0\.0\.0.*AGL_TOKEN=.*AGL_INSECURE=1"):
        await proxy.start()


async def test_a_taken_port_is_said(harness: GatewayHarness) -> None:
    second = LLMProxy(port=harness.proxy.server_launcher.port, store=harness.store)
    with pytest.raises(RuntimeError, match="use another port"):
        await second.start()


async def test_two_gateways_in_one_process_do_not_know_each_other(harness: GatewayHarness) -> None:
    async with GatewayHarness() as other:
        mine, theirs = await harness.attempt(), await other.attempt()
        await asyncio.gather(harness.ask(of=mine), other.ask(of=theirs))
        assert await harness.states(mine) == await other.states(theirs) == ["ok"]
        assert len(harness.model.calls) == len(other.model.calls) == 1
        assert await harness.store.get_rollout_by_id(theirs.rollout_id) is None


async def test_stats_count_calls_by_state(harness: GatewayHarness) -> None:
    await harness.ask()
    await harness.ask(model="unknown")
    await harness.post(harness.proxy.server_launcher.endpoint, {})
    assert harness.proxy.stats() == {
        "calls": {"ok": 1, "refused": 1},
        "lost": 0,
        "rejected": 1,
        "in_flight": 0,
        "waiting": 0,
        "in_hand": 0,
        "weight_version": 0,
        "endpoints": {f"policy at 127.0.0.1:{harness.model.port}": "serving"},
    }


async def test_200_calls_at_once_are_each_recorded_and_answered_in_their_own_words(harness: GatewayHarness) -> None:
    attempts = [await harness.attempt() for _ in range(20)]
    answers = await asyncio.gather(*[harness.ask(f"{i} {j}", of=a) for i, a in enumerate(attempts) for j in range(10)])
    texts = [body["choices"][0]["message"]["content"] for _, body in answers]
    assert texts == [f"you said {i} {j}" for i in range(20) for j in range(10)]
    for i, attempt in enumerate(attempts):
        spans = [span for span in await harness.spans(attempt) if span.parent_id is None]
        assert sorted(span.sequence_id for span in spans) == list(range(1, 11))
        assert {span.attributes["gen_ai.prompt.0.content"] for span in spans} == {f"{i} {j}" for j in range(10)}


# --- spans reach the collector of the environment too, redacted and numbered -----------------------------------------


async def test_calls_are_mirrored_as_they_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "_process", mirror._Process())
    with Collector() as collector:
        monkeypatch.setenv("AGENT_LIGHTNING_OTLP_ENDPOINT", collector.url)
        async with GatewayHarness(keep="tokens") as harness:
            attempt = await harness.attempt()
            status, _ = await harness.ask("a secret", of=attempt)
            assert status == 200
        stored = await harness.store.query_spans(attempt.rollout_id)
        assert {span.span_id: span.sequence_id for span in collector.spans} == {
            span.span_id: span.sequence_id for span in stored
        }
        assert len(collector.spans) == 2
        assert "secret" not in str(collector.spans)
    assert mirror._process.mirror is None


async def test_a_collector_that_cannot_be_used_is_told_when_the_gateway_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_LIGHTNING_OTLP_ENDPOINT", "nowhere")
    with pytest.raises(ValueError, match="AGENT_LIGHTNING_OTLP_ENDPOINT must be http://host:4318"):
        await LLMProxy(store=InMemoryLightningStore()).start()
