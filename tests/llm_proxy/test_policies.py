"""Several agents of one rollout, several policies: each call is counted for the policy whose weights made it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import openai
import pytest

import agentlightning as agl
from agentlightning.adapter import LlmProxyTraceToTriplet, TracerTraceToTriplet, TraceToMessages, TraceToTripletBase
from agentlightning.llm_proxy import LLMProxy
from agentlightning.runner import LitAgentRunner
from agentlightning.tracer.otel import OtelTracer
from agentlightning.training.ledger import read_rollout
from agentlightning.types import AttemptedRollout, ProxyLLM
from tests.llm_proxy.harness import GatewayHarness
from tests.stubs.model_server import ModelServer

TEAM: dict[str, Any] = {
    "writer": {"kind": "trained", "roles": ["writer"], "models": ["writer-7b"]},
    "critic": {"kind": "trained", "roles": ["critic"], "models": ["critic-7b"]},
    "judge": {"kind": "frozen", "models": ["judge-7b"]},
    "bought": {"kind": "external"},
}
MODELS = ("writer-7b", "critic-7b", "judge-7b", "gpt")


def entries(model: ModelServer, *names: str) -> list[Any]:
    return [model.entry(name) for name in names]


@pytest.fixture
async def team() -> AsyncGenerator[GatewayHarness, None]:
    with ModelServer() as model:
        async with GatewayHarness(model_list=entries(model, *MODELS), policies=TEAM) as harness:
            yield harness


async def ask(endpoint: str, model: str, content: str = "go on") -> str | None:
    async with openai.AsyncOpenAI(base_url=endpoint, api_key="any", max_retries=0) as client:
        reply = await client.chat.completions.create(model=model, messages=[{"role": "user", "content": content}])
    return reply.choices[0].message.content


async def run_team(harness: GatewayHarness) -> AttemptedRollout:
    """Run a rollout as an agent of two roles does, with a judge and a bought model beside them."""
    attempt = await harness.attempt()
    ids = attempt.rollout_id, attempt.attempt.attempt_id
    for llm in harness.proxy.as_resources().values():
        await ask(llm.get_base_url(*ids), llm.model, f"I am {llm.model}")
    for model in ("judge-7b", "gpt"):
        await ask(harness.proxy.as_resource(*ids, model=model).endpoint, model)
    return attempt


@pytest.mark.parametrize("adapter", [TracerTraceToTriplet, LlmProxyTraceToTriplet])
async def test_two_agents_of_one_rollout_train_two_policies_and_frozen_and_external_ones_are_not_selected(
    team: GatewayHarness, adapter: type[TraceToTripletBase]
) -> None:
    attempt = await run_team(team)
    policies = [(call.get("role"), call["policy"], call["policy_kind"]) for call in await team.raw(attempt)]
    assert policies == [
        ("writer", "writer", "trained"),
        ("critic", "critic", "trained"),
        (None, "judge", "frozen"),
        (None, "bought", "external"),
    ]
    spans = await team.spans(attempt)
    for policy in ("writer", "critic"):
        (triplet,) = adapter(policy=policy).adapt(spans)
        assert triplet.metadata["policy"] == policy
    assert [triplet.metadata["policy"] for triplet in adapter().adapt(spans)] == ["writer", "critic"]
    assert adapter().explain(spans).counts() == {"not_selected": 2}
    assert len(TraceToMessages().adapt(spans)) == 2


class Team(agl.LitAgent[str]):
    """A writer and a critic, each with the model that it is given by name."""

    async def rollout_async(self, task: str, resources: agl.NamedResources, rollout: agl.AttemptedRollout) -> float:
        words: list[str | None] = []
        for name in ("writer", "critic", "writer"):
            llm = resources[name]
            assert isinstance(llm, agl.LLM)
            endpoint = llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id)
            words.append(await ask(endpoint, llm.model, f"{name}: {task}"))
        return float(len(words))


async def test_an_agent_of_two_roles_is_given_a_model_for_each_by_name(team: GatewayHarness) -> None:
    resources = await team.store.add_resources(team.proxy.as_resources())
    made = await team.store.enqueue_rollout(input="a poem", mode="train", resources_id=resources.resources_id)
    runner: LitAgentRunner[Any] = LitAgentRunner(OtelTracer(), max_rollouts=1)
    with runner.run_context(agent=Team(), store=team.store):
        await runner.iter()
    rollout = await team.store.get_rollout_by_id(made.rollout_id)
    assert isinstance(rollout, AttemptedRollout)
    spans = await team.spans(rollout)
    rows = {}
    for policy in ("writer", "critic"):
        record = read_rollout(rollout, [rollout.attempt], spans, TracerTraceToTriplet(policy=policy))
        assert record.reward == 3.0
        rows[policy] = [call.policy for call in record.calls if call.ref not in record.exclusions]
        assert len(TraceToMessages(policy=policy).adapt(spans)) == len(rows[policy])
    assert rows == {"writer": ["writer", "writer"], "critic": ["critic"]}


async def test_the_ledger_trains_the_policy_that_is_asked_for_and_none_where_it_cannot_tell(
    team: GatewayHarness,
) -> None:
    attempt = await run_team(team)
    await team.store.update_attempt(attempt.rollout_id, "latest", status="succeeded")
    rollout = await team.store.get_rollout_by_id(attempt.rollout_id)
    attempts, spans = await team.store.query_attempts(attempt.rollout_id), await team.spans(attempt)
    assert rollout is not None
    spans.append(reward_of(attempt))

    record = read_rollout(rollout, attempts, spans, TracerTraceToTriplet(policy="writer"))
    assert [len(sample.call_ids) for sample in record.samples] == [1]
    assert list(record.exclusions.values()) == ["not_selected"] * 3

    unsure = read_rollout(rollout, attempts, spans)
    assert unsure.samples == []
    assert set(unsure.exclusions.values()) == {"not_selected"}
    assert "set policy= of the adapter" in str(unsure.explain())


def reward_of(attempt: AttemptedRollout) -> agl.Span:
    return agl.Span.from_attributes(
        rollout_id=attempt.rollout_id,
        attempt_id=attempt.attempt.attempt_id,
        sequence_id=99,
        name="agentlightning.annotation",
        attributes={"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": 1.0},
    )


async def test_an_external_model_without_tokens_is_neither_warned_of_nor_blamed_for_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ModelServer(tokens=False) as model:
        policies: dict[str, Any] = {"bought": {"kind": "external"}}
        async with GatewayHarness(model_list=entries(model, "policy"), policies=policies) as harness:
            assert (await harness.ask())[0] == 200
            assert await harness.states() == ["no_tokens"]
            (call,) = TracerTraceToTriplet().explain(await harness.spans()).calls
            assert call.reason == "not_selected"
    assert not caplog.records


async def test_without_policies_calls_belong_to_none_and_a_role_is_the_name_of_the_agent(
    harness: GatewayHarness,
) -> None:
    attempt = await harness.attempt()
    await harness.ask(of=attempt)
    llm = harness.proxy.as_resource(attempt.rollout_id, attempt.attempt.attempt_id, role="writer")
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    assert (await harness.post(f"{llm.endpoint}/chat/completions", body))[0] == 200
    recorded = await harness.raw(attempt)
    assert [call.get("role") for call in recorded] == [None, "writer"]
    assert not any("policy" in call for call in recorded)
    spans = await harness.spans(attempt)
    assert [t.metadata["agent_name"] for t in TracerTraceToTriplet().adapt(spans)] == ["*", "writer"]
    (writers,) = TracerTraceToTriplet(agent_match="^writer$").adapt(spans)
    assert writers.metadata["agent_name"] == "writer"


async def test_without_policies_what_is_no_role_is_refused(harness: GatewayHarness) -> None:
    url = harness.url().replace("/rollout/", "/role/wri%2Fter/rollout/")
    status, body = await harness.post(url, {"model": "policy", "messages": []})
    assert (status, body["error"]["code"]) == (404, "unknown_role")
    assert "'wri/ter' is not a valid role; a role has 1 to 128 letters" in body["error"]["message"]
    with pytest.raises(ValueError, match="'wri/ter' is not a valid role; a role has 1 to 128 letters"):
        harness.proxy.as_resource(role="wri/ter")


REFUSED = {
    "an unknown role": ("/role/writr", "writer-7b", 404, "did you mean 'writer'"),
    "an unknown model": ("", "judge7b", 404, "Did you mean 'judge-7b'"),
    "another policy's model": ("/role/writer", "judge-7b", 400, "which has the models writer-7b"),
    "no role of the URL grammar": ("/role/wri%2Fter", "writer-7b", 404, "No policy has the role"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_call_that_fits_no_policy_is_refused_and_recorded(team: GatewayHarness, case: str) -> None:
    prefix, model, status, text = REFUSED[case]
    url = team.url().replace("/rollout/", f"{prefix}/rollout/")
    answer = await team.post(url, {"model": model, "messages": []})
    assert answer[0] == status
    assert text in answer[1]["error"]["message"]
    assert await team.states() == ["refused"]
    assert not team.model.calls


@pytest.mark.parametrize("tail", ["/models", "/messages/count_tokens"])
async def test_an_unknown_role_is_refused_where_nothing_is_generated_too(team: GatewayHarness, tail: str) -> None:
    url = team.url(tail).replace("/rollout/", "/role/wroter/rollout/")
    method = "GET" if tail == "/models" else "POST"
    async with team.session.request(method, url, json={"model": "gpt", "messages": []}) as reply:
        assert reply.status == 404
        assert "did you mean 'writer'" in (await reply.json())["error"]["message"]


async def test_a_call_without_a_role_is_refused_where_all_policies_have_one() -> None:
    policies: dict[str, Any] = {"main": {"kind": "trained", "roles": ["solver"]}}
    async with GatewayHarness(policies=policies) as harness:
        status, body = await harness.ask()
        assert (status, body["error"]["code"]) == (400, "no_policy")
        assert "roles: solver" in body["error"]["message"]


CHAT: Any = ("chat/completions", "grader", {"messages": [{"role": "user", "content": "hi"}]})
EMBEDDING: Any = ("embeddings", None, {"input": "x"})


@pytest.mark.parametrize(
    ("policies", "call", "policy"),
    [
        (
            {"main": {"kind": "trained", "models": ["policy"]}, "grader": {"kind": "frozen", "roles": ["grader"]}},
            CHAT,
            "grader",
        ),
        ({"main": {"kind": "trained"}, "search": {"kind": "frozen", "routes": ["embeddings"]}}, EMBEDDING, "search"),
    ],
    ids=["a grader may act by the learning model and is not trained", "a route may have a policy of its own"],
)
async def test_a_role_or_a_route_may_have_a_policy_of_its_own(policies: Any, call: Any, policy: str) -> None:
    async with GatewayHarness(policies=policies) as harness:
        attempt = await harness.attempt()
        tail, role, body = call
        llm = harness.proxy.as_resource(attempt.rollout_id, attempt.attempt.attempt_id, role=role)
        assert (await harness.post(f"{llm.endpoint}/{tail}", {"model": "policy", **body}))[0] == 200
        assert [call["policy"] for call in await harness.raw(attempt)] == [policy]


# --- what an owner may write -------------------------------------------------------------------------------------


def test_resources_per_role_have_the_model_of_their_policy() -> None:
    proxy = LLMProxy(port=4100, model_list=entries(ModelServer(), *MODELS), policies=TEAM)
    resources = proxy.as_resources(sampling_parameters={"temperature": 0.5})
    assert {name: llm.model for name, llm in resources.items() if isinstance(llm, ProxyLLM)} == {
        "writer": "writer-7b",
        "critic": "critic-7b",
    }
    assert resources["critic"].get_base_url("ro-1", "at-1") == (
        "http://127.0.0.1:4100/role/critic/rollout/ro-1/attempt/at-1"
    )


def test_resources_per_role_need_roles() -> None:
    with pytest.raises(ValueError, match="No policy has a role"):
        LLMProxy(model_list=entries(ModelServer(), "m")).as_resources()
    proxy = LLMProxy(model_list=entries(ModelServer(), *MODELS), policies=TEAM)
    with pytest.raises(ValueError, match="The policy 'writer' has the models writer-7b, not 'gpt'"):
        proxy.as_resource(role="writer", model="gpt")
    with pytest.raises(ValueError, match="did you mean 'writer'"):
        proxy.as_resource(role="wroter")


WRONG: dict[str, tuple[Any, str]] = {
    "no map": ([], "policies must be a dict of policies by name; got list"),
    "no name": ({"": {"kind": "trained"}}, "a policy's name must be a non-empty string"),
    "no entry": ({"a": "trained"}, r"policies\['a'\] must be a dict"),
    "an unknown kind": ({"a": {"kind": "train"}}, r"kind must be one of .*; did you mean 'trained'\?; got 'train'"),
    "no kind": ({"a": {}}, "kind must be one of trained, frozen, external"),
    "unknown server tools": (
        {"a": {"kind": "frozen", "server_tools": "no"}},
        "server_tools must be one of drop, refuse",
    ),
    "an unknown field": ({"a": {"kind": "trained", "model": ["m"]}}, r"model is not supported; did you mean 'models'"),
    "a text for a list": ({"a": {"kind": "trained", "models": "m"}}, "models must be a list of names; got 'm'"),
    "an empty list": ({"a": {"kind": "trained", "roles": []}}, "roles must be a list of names"),
    "a role with a slash": ({"a": {"kind": "trained", "roles": ["a/b"]}}, "'a/b' is not a valid role"),
    "an unknown route": ({"a": {"kind": "frozen", "routes": ["embedding"]}}, "did you mean 'embeddings'"),
    "an unknown model": ({"a": {"kind": "frozen", "models": ["n"]}}, r"'n' is not in model_list; known: m"),
    "one role twice": (
        {"a": {"kind": "frozen", "roles": ["x"]}, "b": {"kind": "trained", "roles": ["x"]}},
        "'a' and 'b' both have 'x' in roles",
    ),
    "two for the rest": ({"a": {"kind": "frozen"}, "b": {"kind": "trained"}}, "only one policy may receive"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_policies_are_named_at_construction(case: str) -> None:
    policies, text = WRONG[case]
    with pytest.raises(ValueError, match=text):
        LLMProxy(model_list=entries(ModelServer(), "m"), policies=policies)


async def test_a_trained_policy_may_name_a_model_that_its_algorithm_adds(caplog: pytest.LogCaptureFixture) -> None:
    policies: dict[str, Any] = {"main": {"kind": "trained", "models": ["policy-7b"]}}
    async with GatewayHarness(policies=policies) as harness:
        assert "'policy-7b' is not in model_list; did you mean 'policy'?" in caplog.text
        harness.proxy.update_model_list([harness.model.entry("policy-7b")])
        assert (await harness.ask(model="policy-7b"))[0] == 200
        assert (await harness.raw())[0]["policy"] == "main"


async def test_calls_that_are_replayed_from_a_file_have_their_policies_without_any_model(tmp_path: Path) -> None:
    policies: Any = {"judge": {"kind": "frozen", "models": ["policy"]}}
    file = tmp_path / "calls.jsonl"
    async with GatewayHarness(record=file) as harness:
        await harness.ask(of=await harness.attempt())
    async with GatewayHarness(model_list=[], replay=file, policies=policies) as harness:
        assert (await harness.ask())[0] == 200
        assert (await harness.raw())[0]["policy"] == "judge"


@pytest.mark.parametrize("adapter", [TracerTraceToTriplet, LlmProxyTraceToTriplet, TraceToMessages])
def test_an_adapter_takes_a_policy_by_its_name(adapter: Any) -> None:
    with pytest.raises(ValueError, match="policy must be the name"):
        adapter(policy="")
