"""Fallbacks and aliases: the model that answers a call, the record of it, and the policy that learns from it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from agentlightning.adapter import LlmProxyTraceToTriplet
from agentlightning.llm_proxy import HealthChecks, LLMProxy
from agentlightning.llm_proxy.endpoints.table import ModelTable
from agentlightning.store.memory import InMemoryLightningStore
from tests.llm_proxy.agents import ChatAgent
from tests.llm_proxy.harness import GatewayHarness, Json, arrived, until
from tests.stubs.model_server import Fault, ModelServer

HI: Any = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
TRAINED: Any = {"learner": {"kind": "trained", "models": ["policy"], "roles": ["solver"]}}


@pytest.fixture
async def backup() -> AsyncGenerator[ModelServer, None]:
    with ModelServer(lambda request: "the backup says so") as server:
        yield server


def gateway(backup: ModelServer, *more: Any, **options: Any) -> GatewayHarness:
    """Return a gateway of `policy` and `backup`, the fallback of the first, and of more models."""
    with ModelServer() as model:  # for its port, which it takes again
        entries = [model.entry("policy"), backup.entry("backup"), *more]
    arguments: Any = {"model_list": entries, "fallbacks": {"policy": ["backup"]}, **options}
    return GatewayHarness(model, **arguments)


async def asked_and_answered(harness: GatewayHarness) -> Json:
    """Return the models in the record of the last call."""
    request, call = (await harness.spans())[-2].attributes, (await harness.raw())[-1]
    names = ("model", "policy", "policy_kind", "state")
    return {"asked": request["gen_ai.request.model"], **{name: call.get(name) for name in names}}


async def trained(harness: GatewayHarness, policy: str | None = None) -> int:
    """Return the number of the attempt's calls that can be trained."""
    return len(LlmProxyTraceToTriplet(policy=policy).adapt(await harness.spans()))


# --- fallbacks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", [Fault(500), Fault(503), Fault(529), Fault(429), Fault(cut="before"), Fault(cut="middle")]
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_fallback_answers_where_the_servers_of_a_model_fail(
    backup: ModelServer, fault: Fault, streamed: bool
) -> None:
    async with gateway(backup, health=HealthChecks(failures=99)) as harness:
        harness.model.faults = [fault] * 9
        agent = ChatAgent(harness)
        async with agent.client:
            assert agent.text(await agent.whole(streamed)) == "the backup says so"
        assert backup.calls[0].request["model"] == "backup"
        record = await asked_and_answered(harness)
        assert (record["asked"], record["model"], record["state"]) == ("policy", "backup", "ok")
        assert await trained(harness) == 0
        harness.model.faults.clear()
        assert (await harness.ask())[0] == 200
        assert (await asked_and_answered(harness))["model"] is None
        assert await trained(harness) == 1


async def test_a_fallback_answers_where_nothing_listens_or_an_entry_is_out_of_time(backup: ModelServer) -> None:
    with ModelServer() as slow:
        unreachable = {"model_name": "gone", "litellm_params": {"model": "m", "api_base": "http://127.0.0.1:9/v1"}}
        entries = [unreachable, slow.entry("slow", timeout=0.2), backup.entry("backup")]
        async with GatewayHarness(model_list=entries, fallbacks={"gone": ["slow"], "slow": ["backup"]}) as harness:
            slow.hold()
            assert (await harness.ask(model="gone"))[0] == 200
            assert await asked_and_answered(harness) == {
                **{"asked": "gone", "model": "backup", "state": "ok"},
                **{"policy": "backup", "policy_kind": "frozen"},
            }


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
async def test_a_request_that_a_model_refuses_goes_to_no_fallback(backup: ModelServer, status: int) -> None:
    async with gateway(backup) as harness:
        harness.model.faults = [Fault(status)]
        assert (await harness.ask())[0] == status
        assert backup.calls == []


async def test_a_stream_that_broke_off_is_not_begun_anew_by_a_fallback(backup: ModelServer) -> None:
    async with gateway(backup) as harness:
        harness.model.hold_frames(2)
        async with harness.session.post(harness.url(), json={**HI, "stream": True}) as reply:
            await reply.content.readany()
            harness.model.stop()
            assert b'"error"' in await reply.content.read()
        harness.model.start()
        assert backup.calls == []
        assert await harness.states() == ["upstream_error"]


async def test_where_all_fail_the_first_one_is_heard_and_all_are_named(
    backup: ModelServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway(backup) as harness:
        harness.model.faults, backup.faults = [Fault(500)], [Fault(401)]
        with caplog.at_level(logging.WARNING):
            status, body = await harness.ask()
        assert (status, body["error"]["message"]) == (500, "told to answer 500")
        error = (await harness.spans())[0].attributes["error.message"]
        assert str(error).startswith("The model server of 'policy' returned 500")
        assert str(error).endswith("; the fallback 'backup' also failed (401)")
        record = await asked_and_answered(harness)
        assert (record["asked"], record["model"], record["state"]) == ("policy", None, "upstream_error")
        assert "the model servers of 'policy' failed; calling backup instead" in caplog.text


async def test_each_fallback_is_asked_in_a_dialect_of_its_own(backup: ModelServer) -> None:
    """Messages are translated for a server of chats and sent unchanged to a native one; and the other way round."""
    native = ["messages", "responses"]
    for first, second in ((None, native), (native, None)):
        async with gateway(backup) as harness:
            own, other = ({} if dialects is None else {"dialects": dialects} for dialects in (first, second))
            entries = [harness.model.entry("policy", **own), backup.entry("backup", **other)]
            harness.proxy.update_model_list(entries)
            harness.model.faults = [Fault(500)] * 2
            status, body = await harness.post("/v1/messages", {**HI, "max_tokens": 9})
            assert (status, body["content"][0]["text"]) == (200, "the backup says so")
            status, body = await harness.post("/v1/responses", {"model": "policy", "input": "hi"})
            assert (status, body["output"][-1]["content"][0]["text"]) == (200, "the backup says so")
            routes = {"chat/completions"} if second is None else set(native)
            assert {call.path.removeprefix("/v1/") for call in backup.calls} == routes
            backup.calls.clear()


async def test_a_fallback_that_cannot_be_asked_in_any_form_is_passed_over(backup: ModelServer) -> None:
    texts = backup.entry("texts", dialects=["completions"])
    async with gateway(backup, texts, fallbacks={"policy": ["texts", "backup"]}) as harness:
        harness.model.faults = [Fault(500)]
        assert (await harness.ask())[0] == 200
        assert (await asked_and_answered(harness))["model"] == "backup"


@pytest.mark.parametrize(("route", "text"), [("/v1/completions", {"prompt": "hi"}), ("/v1/embeddings", {"input": "h"})])
async def test_other_routes_have_fallbacks_too(backup: ModelServer, route: str, text: Any) -> None:
    async with gateway(backup) as harness:
        harness.model.faults = [Fault(500)]
        assert (await harness.post(harness.url(route), {"model": "policy", **text}))[0] == 200
        assert [call.path for call in backup.calls] == [route]


async def test_a_file_of_calls_holds_no_tokens_of_a_fallback(backup: ModelServer, tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    async with gateway(backup, record=file) as harness:
        harness.model.faults = [Fault(500)]
        assert (await harness.ask())[0] == 200
    async with gateway(backup, replay=file) as harness:
        status, body = await harness.ask()
        assert (status, body["choices"][0]["message"]["content"]) == (200, "the backup says so")
        assert await harness.states() == ["no_tokens"]


async def test_a_batch_has_fallbacks_too(backup: ModelServer) -> None:
    async with gateway(backup) as harness:
        harness.model.faults = [Fault(500)]
        (answer,) = await harness.proxy.batch_query(["hi"], model="policy")
        assert answer["choices"][0]["message"]["content"] == "the backup says so"


async def test_the_replicas_of_a_model_are_asked_before_its_fallback(backup: ModelServer) -> None:
    async with ModelServer() as second, gateway(backup, second.entry("policy")) as harness:
        for failing, answered in (([harness.model], None), ([harness.model, second], "backup")):
            for server in failing:
                server.faults = [Fault(500)]
            assert (await harness.ask())[0] == 200
            assert (await asked_and_answered(harness))["model"] == answered
            for server in failing:
                server.faults = []


async def test_a_fallback_is_asked_at_once_where_a_server_puts_off_for_long(backup: ModelServer) -> None:
    async with gateway(backup) as harness:
        harness.model.faults = [Fault(429, headers={"Retry-After": "25"})] * 2
        assert (await harness.ask())[0] == 200
        assert (len(harness.model.calls), len(backup.calls)) == (1, 1)


async def test_a_model_that_goes_on_failing_is_left_alone_until_it_is_well(backup: ModelServer) -> None:
    checks = HealthChecks(interval_seconds=0.02, rest_seconds=600.0, longest_rest_seconds=600.0)
    async with gateway(backup, health=checks) as harness:
        name = f"policy at 127.0.0.1:{harness.model.port}"
        harness.model.get_status = 500
        harness.model.faults = [Fault(500)] * 99
        for _ in range(checks.failures + 5):
            assert (await harness.ask())[0] == 200
        assert (len(harness.model.calls), len(backup.calls)) == (checks.failures, checks.failures + 5)
        backup.faults = [Fault(401)]
        harness.model.faults = []
        assert (await harness.ask())[0] == 200, "where all fallbacks fail, trying is better than refusing"
        assert (await asked_and_answered(harness))["model"] is None
        assert harness.proxy.stats()["endpoints"][name] == "serving"

        harness.model.faults = [Fault(500)] * checks.failures
        for _ in range(checks.failures):
            assert (await harness.ask())[0] == 200
        harness.model.get_status = 200
        await until(lambda: harness.proxy.stats()["endpoints"][name] == "failing")
        assert (await harness.ask())[0] == 200
        assert (await asked_and_answered(harness))["model"] is None


# --- who learns ------------------------------------------------------------------------------------------------------


async def test_what_a_fallback_answered_for_the_policy_is_trained_by_nobody(backup: ModelServer) -> None:
    async with gateway(backup, policies={**TRAINED, "rest": {"kind": "frozen"}}) as harness:
        harness.model.faults = [Fault(500)] * 2
        assert (await harness.ask())[0] == 200
        url = harness.proxy.as_resource(*harness.ids, role="solver").endpoint + "/chat/completions"
        assert (await harness.post(url, HI))[0] == 200
        assert (await asked_and_answered(harness))["policy_kind"] == "frozen"
        assert [await trained(harness, policy) for policy in (None, "learner")] == [0, 0]


async def test_what_the_policy_answered_as_the_fallback_of_another_model_is_the_policys(backup: ModelServer) -> None:
    policies: Any = {**TRAINED, "judge": {"kind": "frozen", "models": ["backup"], "roles": ["critic"]}}
    async with gateway(backup, policies=policies, fallbacks={"backup": ["policy"]}) as harness:
        backup.faults = [Fault(500)] * 2
        assert (await harness.ask(model="backup"))[0] == 200
        record = await asked_and_answered(harness)
        assert (record["asked"], record["model"], record["policy"]) == ("backup", "policy", "learner")
        assert await trained(harness, "learner") == 1
        url = harness.proxy.as_resource(*harness.ids, role="critic").endpoint + "/chat/completions"
        assert (await harness.post(url, {**HI, "model": "backup"}))[0] == 200
        assert (await asked_and_answered(harness))["policy"] == "judge", "a role acts by its own policy"
        assert await trained(harness, "learner") == 1


async def test_a_fallback_that_is_of_the_same_policy_is_trained(backup: ModelServer) -> None:
    policies: Any = {"learner": {"kind": "trained", "models": ["policy", "backup"], "roles": ["solver"]}}
    async with gateway(backup, policies=policies) as harness:
        harness.model.faults = [Fault(500)] * 2
        url = harness.proxy.as_resource(*harness.ids, "policy", role="solver").endpoint + "/chat/completions"
        for each in (url, harness.url()):
            assert (await harness.post(each, HI))[0] == 200
        assert len(backup.calls) == await trained(harness, "learner") == 2


async def test_calls_at_the_same_time_have_each_their_own_model_on_record(backup: ModelServer) -> None:
    async with gateway(backup, aliases={"gpt-4o": "policy"}, health=HealthChecks(failures=99)) as harness:
        harness.model.faults = [Fault(500)] * 15
        names = ["policy", "backup", "gpt-4o"] * 10
        asking = [harness.ask(f"call {i}", model=name) for i, name in enumerate(names)]
        assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 30
        spans = await harness.spans()
        requests = {span.span_id: span for span in spans if span.name == "litellm_request"}
        answers = {f"call {i}": name for i, name in enumerate(names)}
        for span in spans:
            if span.name == "raw_gen_ai_request":
                request = requests[span.parent_id or ""].attributes
                prompt, reply = request["gen_ai.prompt.0.content"], str(request["gen_ai.completion.0.content"])
                assert request["gen_ai.request.model"] == answers[str(prompt)]
                model = span.attributes.get("agentlightning.call.model", answers[str(prompt)])
                assert reply == ("the backup says so" if model == "backup" else f"you said {prompt}")
                assert (span.attributes.get("agentlightning.call.policy_kind") == "frozen") == (
                    model == "backup" and answers[str(prompt)] != "backup"
                )


# --- aliases ---------------------------------------------------------------------------------------------------------


async def test_an_alias_is_the_model_by_another_name(backup: ModelServer) -> None:
    async with gateway(backup, aliases={"gpt-4o": "policy"}, policies=TRAINED) as harness:
        assert (await harness.ask(model="gpt-4o"))[0] == 200
        assert harness.model.calls[0].request["model"] == "policy"
        assert await asked_and_answered(harness) == {
            **{"asked": "gpt-4o", "model": "policy", "state": "ok"},
            **{"policy": "learner", "policy_kind": "trained"},
        }
        assert await trained(harness, "learner") == 1
        role = harness.proxy.as_resource(*harness.ids, "gpt-4o", role="solver")
        assert role.model == "policy"
        assert (await harness.post(f"{role.endpoint}/chat/completions", {**HI, "model": "gpt-4o"}))[0] == 200
        counting = harness.url("/v1/messages/count_tokens")
        assert (await harness.post(counting, {**HI, "model": "gpt-4o"}))[0] == 200
        async with openai.AsyncOpenAI(base_url=harness.url("/v1"), api_key="any", max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == ["policy", "backup", "gpt-4o"]
            assert (await client.models.retrieve("gpt-4o")).id == "gpt-4o"
            with pytest.raises(openai.NotFoundError, match="Did you mean 'gpt-4o'"):
                await client.models.retrieve("gpt-4")


async def test_an_alias_has_the_fallbacks_of_its_model_and_may_be_one(backup: ModelServer) -> None:
    aliases = {"gpt-4o": "policy", "cheap": "backup"}
    async with gateway(backup, aliases=aliases, fallbacks={"gpt-4o": ["cheap"]}) as harness:
        harness.model.faults = [Fault(500)] * 2
        for name in ("gpt-4o", "policy"):
            assert (await harness.ask(model=name))[0] == 200
            record = await asked_and_answered(harness)
            assert (record["asked"], record["model"]) == (name, "backup")


# --- the configuration of LiteLLM's router ---------------------------------------------------------------------------


async def test_a_configuration_of_litellm_is_read(backup: ModelServer) -> None:
    with ModelServer() as model:
        config = {
            "model_list": [model.entry("policy"), backup.entry("backup")],
            "router_settings": {"fallbacks": [{"policy": ["backup"]}], "model_group_alias": {"gpt-4o": "policy"}},
            "litellm_settings": {"num_retries": 1},
        }
        async with GatewayHarness(model_list=None, litellm_config=config) as harness:
            model.faults = [Fault(500), Fault(500)]
            assert (await harness.ask(model="gpt-4o"))[0] == 200
            assert (await asked_and_answered(harness))["model"] == "backup"
            assert len(model.calls) == 2, "one retry"


async def test_default_fallbacks_are_those_of_models_without_their_own(backup: ModelServer) -> None:
    config = {"litellm_settings": {"default_fallbacks": ["backup"]}}
    async with gateway(backup, fallbacks=None, litellm_config=config) as harness:
        harness.model.faults = [Fault(500)]
        assert (await harness.ask())[0] == 200
        await backup.until(arrived(1))


def entries(*names: str) -> list[Any]:
    return [{"model_name": n, "litellm_params": {"model": n, "api_base": "http://127.0.0.1:1/v1"}} for n in names]


def test_fallbacks_of_fallbacks_are_asked_and_each_model_once() -> None:
    table = ModelTable(entries(*"abcde"), {"a": ["b", "d"], "b": ["c", "a"], "*": ["e"], "d": ["gone"]})
    assert table.chain("a") == ["a", "b", "c", "e", "d"]
    assert table.chain("b") == ["b", "c", "e", "a", "d"]
    assert table.chain("e") == ["e"]
    assert table.chain("nobody") == ["nobody", "e"]


WRONG: list[tuple[Any, str]] = [
    ({"fallbacks": {"a": ["bb", "x"]}}, r"fallbacks\['a'\]: 'bb' is not in model_list; did you mean 'b'\?"),
    ({"fallbacks": {"x": ["b"]}}, r"fallbacks\['x'\]: 'x' is not in model_list; known: a, b"),
    ({"fallbacks": {"a": ["a"]}}, r"fallbacks\['a'\] is its own fallback: \['a'\]"),
    ({"fallbacks": {"a": ["b", "b"]}}, r"fallbacks\['a'\] contains a model twice"),
    ({"fallbacks": [{"a": ["b"]}, {"a": ["b"]}]}, r"fallbacks\['a'\] is set twice"),
    ({"fallbacks": {"a": []}}, r"fallbacks\['a'\] must be a list of model names; got \[\]"),
    ({"fallbacks": {"a": [{"model": "b"}]}}, r"fallbacks\['a'\] must be a list of model names"),
    ({"fallbacks": {"a": 1}}, r"fallbacks\['a'\] must be a list of model names; got 1"),
    ({"fallbacks": "b"}, r"fallbacks must be a dict such as \{'a': \['b'\]\}; got 'b'"),
    ({"aliases": {"c": "x"}}, r"aliases\['c'\]: 'x' is not in model_list; known: a, b"),
    ({"aliases": {"a": "b"}}, r"aliases: 'a' is the name of a model in model_list; choose another name"),
    ({"aliases": {"c": "d", "d": "c"}}, r"aliases\['c'\] must be the name of a model; 'd' is also an alias"),
    ({"aliases": {"c": {"model": "a", "hidden": True}}}, r"aliases\['c'\] must be the name of a model; got"),
    ({"aliases": {"": "a"}}, r"aliases\[''\] must be the name of a model"),
    ({"aliases": ["a"]}, r"aliases must be a dict such as"),
    ({"litellm_config": ["a"]}, r"litellm_config must be a dict such as"),
    ({"litellm_config": {"router_settings": ["a"]}}, r"litellm_config\['router_settings'\] must be a dict"),
    (
        {"litellm_config": {"general_settings": {}}},
        r"litellm_config\['general_settings'\] is not supported: this gatewa",
    ),
    ({"litellm_config": {"router_setting": {}}}, r"did you mean 'router_settings'"),
    (
        {"litellm_config": {"router_settings": {"timeout": 3}}},
        r"\['timeout'\] is not supported.*'timeout' in the entri",
    ),
    ({"litellm_config": {"router_settings": {"fallback": []}}}, r"\['fallback'\] is not.*did you mean 'fallbacks'"),
    (
        {"litellm_config": {"litellm_settings": {"num_retries": 2.5}}},
        r"num_retries must be a whole number of 0 or more",
    ),
    ({"litellm_config": {"model_list": entries("a")}}, r"model_list is set twice, as an argument and in litellm_con"),
    (
        {"litellm_config": {"router_settings": {"num_retries": 1}, "litellm_settings": {"num_retries": 2}}},
        r"litellm_config contains two values of 'num_retries': 1",
    ),
    (
        {"fallbacks": {"a": ["b"]}, "litellm_config": {"router_settings": {"fallbacks": [{"b": ["a"]}]}}},
        r"fallbacks is set twice, as an argument and in litellm_config",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_names_and_settings_are_refused_by_their_place(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLMProxy(model_list=entries("a", "b"), **arguments)


async def test_a_model_that_an_algorithm_adds_may_be_named_before() -> None:
    aliases = {"gpt-4o": "policy"}
    store = InMemoryLightningStore()
    for proxy in (
        LLMProxy(aliases=aliases, store=store),
        LLMProxy(model_list=entries("judge"), aliases=aliases, store=store, policies=TRAINED),
    ):
        proxy.update_model_list(entries("judge", "policy"))
        await proxy.start()
        proxy.update_model_list(entries("judge"))  # as an algorithm leaves it
        await proxy.stop()
    with pytest.raises(ValueError, match=r"aliases\['gpt-4o'\]: 'policy' is not in model_list"):
        await LLMProxy(aliases=aliases, store=store).start()


def test_a_model_by_the_name_of_an_alias_changes_nothing() -> None:
    proxy = LLMProxy(model_list=entries("policy"), aliases={"gpt-4o": "policy"})
    with pytest.raises(ValueError, match="'gpt-4o' is the name of a model in model_list"):
        proxy.update_model_list(entries("policy", "gpt-4o"))
    assert [entry["model_name"] for entry in proxy.model_list] == ["policy"]


# --- the list of models ----------------------------------------------------------------------------------------------


@pytest.fixture
async def harness() -> AsyncGenerator[GatewayHarness, None]:
    with ModelServer() as model:
        async with GatewayHarness(model_list=[model.entry(name) for name in ("policy", "org/judge")]) as ready:
            yield ready


async def test_openais_client_lists_and_retrieves_models(harness: GatewayHarness) -> None:
    url = harness.url("/v1")
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["policy", "org/judge"]
        for name in ("policy", "org/judge"):
            assert (await client.models.retrieve(name)).id == name
        with pytest.raises(openai.NotFoundError, match="Did you mean 'policy'"):
            await client.models.retrieve("polcy")


async def test_anthropics_client_lists_and_retrieves_models(harness: GatewayHarness) -> None:
    url = harness.url("")
    async with anthropic.AsyncAnthropic(base_url=url, api_key="any", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["policy", "org/judge"]
        assert (await client.models.retrieve("org/judge")).display_name == "org/judge"
