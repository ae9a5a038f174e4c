"""The sampling parameters of a rollout's resources in the calls of its agent, whichever client makes them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from agentlightning import LightningStoreClient
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import LLM, AttemptedRollout, CustomResource, NamedResources, ProxyLLM
from tests.llm_proxy.harness import HI, REQUESTS, GatewayHarness
from tests.stubs.model_server import Fault, ModelServer

SAMPLING = {"temperature": 0.25, "top_k": 7, "max_tokens": 5}
LIMITS = {"chat/completions": "max_completion_tokens", "responses": "max_output_tokens"}
"""The agent's own name of the limit; in the others it is max_tokens."""


async def claimed(harness: GatewayHarness, resources: dict[str, Any] | None, **options: Any) -> AttemptedRollout:
    """Return the attempt of a runner that gives the agent these resources; a dict is those of the model `policy`."""
    published: NamedResources = {}
    for name, each in (resources or {}).items():
        published[name] = proxied(each) if isinstance(each, dict) else each
    if resources is not None:
        await harness.store.add_resources(published)
    await harness.store.enqueue_rollout("task", **options)
    attempt = await harness.store.dequeue_rollout(worker_id="runner")
    assert attempt is not None
    return attempt


def proxied(sampling: Any, model: str = "policy") -> ProxyLLM:
    return ProxyLLM(endpoint="http://gateway", model=model, sampling_parameters=sampling)


async def sent(harness: GatewayHarness, attempt: AttemptedRollout, **request: Any) -> dict[str, Any]:
    """Make one call, and return the fields that the model server got in addition to the messages and the model."""
    status, reply = await harness.ask(of=attempt, **request)
    assert status == 200, reply
    body = harness.model.calls[-1].request
    return {name: body[name] for name in body if name not in ("model", "messages", "logprobs", "return_token_ids")}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat/completions", "completions", "messages", "responses"])
async def test_the_gateway_sets_what_the_agent_left_out_and_records_it(
    harness: GatewayHarness, route: str, stream: bool
) -> None:
    harness.proxy.update_model_list([harness.model.entry(each) for each in ("policy", "other")])
    attempt = await claimed(harness, {"main_llm": SAMPLING})
    limit = LIMITS.get(route, "max_tokens")
    for name in ("policy", "other"):
        request = {**REQUESTS[route], "model": name, "stream": stream}
        results: list[Any] = []
        for own in ({}, {"temperature": 1.0, "top_k": None, limit: 3}):
            async with harness.session.post(harness.url(f"/v1/{route}", of=attempt), json={**request, **own}) as reply:
                assert reply.status == 200, await reply.text()
                await reply.read()
            body = harness.model.calls[-1].request
            limits = {value for key, value in body.items() if key.startswith("max_")}
            results.append((body.get("temperature"), body.get("top_k"), limits))
        unlimited = set[int]() if "max_tokens" not in request else {9}
        filled = (0.25, 7, unlimited or {5}) if name == "policy" else (None, None, unlimited)
        assert results == [filled, (1.0, 7 if name == "policy" else None, {3})]
    first, second, *others = await harness.raw(attempt)
    names = {"temperature", "top_k", *(() if route == "messages" else ("max_tokens",))}
    assert (set(first["filled_in"]), second["filled_in"]) == (names, ["top_k"])
    assert (first["constrained_by"], second["constrained_by"]) == (["top_k"], ["top_k"])
    assert not [call for call in others if "filled_in" in call]
    [span, *_] = [span for span in await harness.spans(attempt) if span.name == "litellm_request"]
    assert (span.attributes["gen_ai.request.temperature"], span.attributes["gen_ai.request.top_k"]) == (0.25, 7)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"max_completion_tokens": 4}, {"max_completion_tokens": 4}),
        ({"max_output_tokens": 4}, {"max_tokens": 4}),
        ({"extra_body": {"top_k": 2, "min_p": 0.5}, "min_p": 0.1}, {"top_k": 2, "min_p": 0.1}),
        ({"extra_body": "no", "extra_headers": {"authorization": "key"}, "timeout": 3}, {}),
        ({"messages": [], "model": "other", "stream": True, "n": 9, "tools": [], "store": True}, {}),
        ({"temperature": None, "stop": ["\n"], "seed": 3}, {"stop": ["\n"], "seed": 3}),
        ({"top_p": math.nan, "deep": {"a": [{"b": math.inf}]}}, {"top_p": None, "deep": {"a": [{"b": None}]}}),
        ({"a" * 5000: "b" * 5000}, {"a" * 5000: "b" * 5000}),
    ],
)
async def test_a_resource_sets_only_how_tokens_are_sampled(
    harness: GatewayHarness, parameters: dict[str, Any], expected: dict[str, Any]
) -> None:
    attempt = await claimed(harness, {"main_llm": parameters})
    assert await sent(harness, attempt) == expected


@pytest.mark.parametrize(
    ("resources", "role", "expected"),
    [
        ({"a": {"temperature": 0.5, "top_p": 1}, "b": {"temperature": 0.5, "top_p": 0.8}}, None, {"temperature": 0.5}),
        ({"a": {"temperature": 0.5}, "b": {}}, None, {}),
        ({"a": {"temperature": 0.5}, "solver": {"temperature": 0.1}}, "solver", {"temperature": 0.1}),
        ({"a": {"temperature": 0.5}, "solver": {}}, "solver", {}),
        ({"a": {"temperature": 0.5}, "solver": proxied({"temperature": 0.1}, "judge")}, "solver", {"temperature": 0.5}),
        ({"a": proxied({"temperature": 0.5}, "alias")}, None, {"temperature": 0.5}),
        ({"a": LLM(endpoint="http://else", model="policy", sampling_parameters={"temperature": 0.5})}, None, {}),
        ({"a": CustomResource(values={"model": "policy", "sampling_parameters": SAMPLING})}, None, {}),
        ({}, None, {}),
        (None, None, {}),
    ],
)  # fmt: skip
async def test_the_resource_of_the_model_and_the_role_counts(
    resources: dict[str, Any] | None, role: str | None, expected: dict[str, Any]
) -> None:
    async with GatewayHarness(aliases={"alias": "policy"}) as harness:
        attempt = await claimed(harness, resources)
        url = harness.url(of=attempt)
        status, _ = await harness.post(
            url if role is None else url.replace("/rollout/", f"/role/{role}/rollout/"),
            {"model": "policy", "messages": HI},
        )
        body = harness.model.calls[-1].request
        assert (status, {name: body[name] for name in ("temperature", "top_p") if name in body}) == (200, expected)


async def test_a_fallback_has_the_parameters_of_its_own_resource() -> None:
    with ModelServer() as model:  # for its port, which it takes again
        entry = model.entry("policy")
    with ModelServer() as other:
        options: Any = {"model_list": [entry, other.entry("other")], "fallbacks": {"policy": ["other"]}}
        async with GatewayHarness(model, **options) as harness:
            model.faults = [Fault(500)]
            attempt = await claimed(harness, {"main_llm": SAMPLING, "b": proxied({"top_p": 0.5}, "other")})
            assert (await harness.ask(of=attempt))[0] == 200
            body = other.calls[-1].request
            assert (body["top_p"], "top_k" in body, "max_tokens" in body) == (0.5, False, False)
            [call] = await harness.raw(attempt)
            assert (call["model"], call["filled_in"], call["constrained_by"]) == ("other", ["top_p"], ["top_p"])


class CountedStore(InMemoryLightningStore):
    """A store that counts reads of resources, and may fail at them."""

    reads = 0
    fails = False

    async def get_resources_by_id(self, *args: Any, **named: Any) -> Any:
        self.reads += 1
        if self.fails:
            raise OSError("away")
        return await super().get_resources_by_id(*args, **named)

    async def get_latest_resources(self, **named: Any) -> Any:
        self.reads += 1
        return await super().get_latest_resources(**named)


async def test_a_version_of_resources_is_read_once_and_an_attempt_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentlightning.llm_proxy.access.admission.LOOKUP_SECONDS", 0.0)
    store = CountedStore()
    async with GatewayHarness(store=store) as harness:
        old = await store.update_resources("r", {"main_llm": proxied({"temperature": 0.5})})
        attempts = [await claimed(harness, None, resources_id="r") for _ in range(3)]
        for attempt in [*attempts, *attempts]:
            assert await sent(harness, attempt) == {"temperature": 0.5}
        assert store.reads == 1
        new = await store.update_resources("r", {"main_llm": proxied({"temperature": 0.1})})
        assert (old.version, new.version) == (1, 2)
        later = await claimed(harness, None, resources_id="r")
        await store.update_rollout(attempts[0].rollout_id, resources_id="r")  # its agent has the older ones
        for attempt, temperature in ((attempts[0], 0.5), (attempts[1], 0.5), (later, 0.1)):
            assert await sent(harness, attempt) == {"temperature": temperature}
        missing = await claimed(harness, None, resources_id="missing")
        assert await sent(harness, missing) == {}


async def test_a_call_is_not_made_while_its_parameters_cannot_be_read() -> None:
    store = CountedStore()
    async with GatewayHarness(store=store) as harness:
        attempt = await claimed(harness, {"main_llm": {"temperature": 0.5}})
        store.fails = True
        status, reply = await harness.ask(of=attempt)
        assert (status, reply["error"]["code"], harness.model.calls) == (503, "store_unavailable", [])
        store.fails = False
        assert await sent(harness, attempt) == {"temperature": 0.5}


async def test_a_gateway_on_another_machine_and_its_successor_know_the_parameters_too(
    client: LightningStoreClient,
) -> None:
    attempt: AttemptedRollout | None = None
    for _ in range(2):
        async with GatewayHarness(store=client) as harness:
            attempt = attempt or await claimed(harness, {"main_llm": SAMPLING})
            assert await sent(harness, attempt) == SAMPLING
            await harness.proxy.stop()


async def test_without_resources_of_its_own_an_attempt_has_those_that_its_runner_takes() -> None:
    async with GatewayHarness() as harness:
        attempt = await claimed(harness, None)
        assert attempt.resources_id is None
        await harness.store.add_resources({"main_llm": proxied({"temperature": 0.5})})
        assert await sent(harness, attempt) == {"temperature": 0.5}


async def test_a_file_of_calls_has_the_parameters_and_replays_only_the_same_ones(tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    async with GatewayHarness(record=file) as harness:
        assert (await harness.ask(of=await claimed(harness, {"main_llm": SAMPLING})))[0] == 200
    async with GatewayHarness(replay=file) as harness:
        for sampling, status in ((SAMPLING, 200), ({**SAMPLING, "temperature": 0.5}, 404)):
            attempt = await claimed(harness, {"main_llm": sampling})
            assert (await harness.ask(of=attempt))[0] == status
            assert (await harness.raw(attempt))[0]["filled_in"] == ["max_tokens", "temperature", "top_k"]
        assert harness.model.calls == []


async def test_a_call_outside_a_runner_is_left_as_it_is(harness: GatewayHarness) -> None:
    await harness.store.add_resources({"main_llm": proxied({"temperature": 0.5})})
    assert await sent(harness, await harness.attempt()) == {}
    await harness.proxy.batch_query(["hi"], model="policy")
    assert "temperature" not in harness.model.calls[-1].request
