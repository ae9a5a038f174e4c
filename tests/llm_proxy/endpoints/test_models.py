"""Settings of an entry of `model_list`, against two real servers of one model."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
from collections import Counter
from typing import Any

import pytest

from agentlightning.llm_proxy import HealthChecks, LLMProxy
from agentlightning.llm_proxy.endpoints.models import ModelEndpoint
from agentlightning.llm_proxy.endpoints.table import ModelTable
from agentlightning.types import AttemptedRollout
from tests.llm_proxy.agents import ChatAgent
from tests.llm_proxy.harness import GatewayHarness, until
from tests.stubs.model_server import Fault, ModelServer, encode

HI: Any = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
SHORT = 0.2
"""Seconds before a server that does not answer is given up."""
TENANT = "tenant-planted-0123456789"


async def attempt_at(harness: GatewayHarness, server: ModelServer) -> AttemptedRollout:
    """Return an attempt that the gateway sends to this server first."""
    while True:
        attempt = await harness.attempt()
        first = ModelTable(harness.proxy.model_list).endpoints("policy", attempt.rollout_id)[0]
        if first.api_base == server.base_url:
            return attempt


# --- timeout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_server_that_is_too_slow_is_left_for_the_next(
    two: tuple[GatewayHarness, ModelServer], streamed: bool
) -> None:
    harness, second = two
    slow = harness.model.entry("policy", timeout=SHORT)
    harness.proxy.update_model_list([slow, second.entry("policy")])
    attempt = await attempt_at(harness, harness.model)
    harness.model.hold()
    agent = ChatAgent(harness, attempt)
    async with agent.client:
        assert agent.text(await agent.whole(streamed)) == "you said hi"
    await harness.model.until(lambda calls: calls[0].client_left)  # what came too late is not generated on
    (call,) = await harness.raw(attempt)
    assert (call["state"], call["upstream_tries"]) == ("ok", 2)
    assert call["completion_token_ids"] == encode("you said hi")


async def test_the_only_server_being_too_slow_is_a_504_that_names_the_setting(harness: GatewayHarness) -> None:
    harness.proxy.update_model_list([harness.model.entry("policy", timeout=SHORT)])
    harness.model.hold()
    status, body = await harness.ask()
    assert (status, body["error"]["code"]) == (504, "timeout")
    assert "'policy' timed out: timeout (no reply in 0.2 s, the time limit in its entry)" in body["error"]["message"]
    assert await harness.states() == ["upstream_error"]


async def test_a_timeout_is_tried_again_as_often_as_num_retries_says() -> None:
    async with GatewayHarness(num_retries=2) as harness:
        harness.proxy.update_model_list([harness.model.entry("policy", timeout=SHORT)])
        harness.model.hold()
        status, body = await harness.ask()
        assert (status, "tries: 3" in body["error"]["message"]) == (504, True)


async def test_a_stream_has_the_time_until_its_first_bytes_and_then_all_that_it_needs(
    two: tuple[GatewayHarness, ModelServer],
) -> None:
    harness, second = two
    limits: Any = {"timeout": 600, "stream_timeout": SHORT}
    harness.proxy.update_model_list([server.entry("policy", **limits) for server in (harness.model, second)])
    attempt = await attempt_at(harness, harness.model)
    harness.model.hold_frames(0)  # the head of the stream comes, and no frame
    second.hold_frames(1)
    agent = ChatAgent(harness, attempt)
    async with agent.client:
        events = agent.events()
        first = await anext(events)
        await asyncio.sleep(3 * SHORT)
        second.release()
        assert "".join(map(agent.text_of, [first, *[event async for event in events]])) == "you said hi"
    assert await harness.states(attempt) == ["ok"]


async def test_stream_timeout_does_not_hold_for_a_reply_in_one_piece() -> None:
    async with GatewayHarness(ModelServer(delay=3 * SHORT)) as harness:
        harness.proxy.update_model_list([harness.model.entry("policy", stream_timeout=SHORT)])
        assert (await harness.ask())[0] == 200


async def test_counting_tokens_has_the_timeout_too(harness: GatewayHarness) -> None:
    harness.proxy.update_model_list([harness.model.entry("policy", timeout=SHORT)])
    harness.model.hold()
    status, body = await harness.post("/v1/messages/count_tokens", HI)
    assert (status, "TimeoutError" in body["error"]["message"]) == (502, True)


# --- weight ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weights", "shares"), [((1, 1), (4, 4)), ((3, 1), (6, 2))])
async def test_calls_at_the_same_time_are_shared_by_weight_where_there_is_least_to_do(
    two: tuple[GatewayHarness, ModelServer], weights: tuple[int, int], shares: tuple[int, int]
) -> None:
    harness, second = two
    servers = harness.model, second
    entries = [server.entry("policy", weight=weight) for server, weight in zip(servers, weights, strict=True)]
    harness.proxy.update_model_list(entries)
    attempts = [await harness.attempt() for _ in range(8)]
    for server in servers:
        server.hold()
    asking = [asyncio.create_task(harness.ask(of=attempt)) for attempt in attempts]
    await until(lambda: len(harness.model.calls) + len(second.calls) == 8)
    for server in servers:
        server.release()
    assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 8
    assert (len(harness.model.calls), len(second.calls)) == shares


def weighted(*weights: float) -> ModelTable:
    addresses = [f"http://127.0.0.1:{port}/v1" for port in range(1, len(weights) + 1)]
    return ModelTable(
        [
            {"model_name": "m", "litellm_params": {"model": "m", "api_base": address, "weight": weight}}
            for address, weight in zip(addresses, weights, strict=True)
        ]
    )


def homes(table: ModelTable) -> dict[str, str]:
    return {f"r{i}": table.endpoints("m", f"r{i}")[0].api_base for i in range(4000)}


def test_a_rollout_goes_to_an_endpoint_as_often_as_its_weight_says_and_stays() -> None:
    before, after = homes(weighted(1, 2, 5)), homes(weighted(1, 2, 8))
    shares = [count / 4000 for _, count in sorted(Counter(before.values()).items())]
    assert shares == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.02)
    moved = {after[rollout] for rollout in before if after[rollout] != before[rollout]}
    assert moved == {"http://127.0.0.1:3/v1"}, "only the one that has more weight takes over rollouts"


# --- max_tokens and extra_body ---------------------------------------------------------------------------------------

ROUTES: dict[str, tuple[Any, str]] = {
    "/v1/chat/completions": ({"messages": HI["messages"]}, "max_tokens"),
    "/v1/completions": ({"prompt": "hi"}, "max_tokens"),
    "/v1/responses": ({"input": "hi"}, "max_output_tokens"),
}


@pytest.mark.parametrize("route", ROUTES)
async def test_max_tokens_holds_where_a_request_names_no_limit(harness: GatewayHarness, route: str) -> None:
    prompt, name = ROUTES[route]
    dialects = ["chat/completions", "completions", "responses"]
    harness.proxy.update_model_list([harness.model.entry("policy", max_tokens=33, dialects=dialects)])
    for limit_in_request, limit in ((None, 33), (500, 500)):
        body = {"model": "policy", **prompt, name: limit_in_request}
        assert (await harness.post(harness.url(route), body))[0] == 200
        assert harness.model.calls[-1].request[name] == limit


async def test_a_limit_in_the_newer_spelling_is_a_limit_and_embeddings_have_none(harness: GatewayHarness) -> None:
    harness.proxy.update_model_list([harness.model.entry("policy", max_tokens=33)])
    await harness.ask(max_completion_tokens=5)
    assert "max_tokens" not in harness.model.calls[-1].request
    assert (await harness.post("/v1/embeddings", {"model": "policy", "input": "hi"}))[0] == 200
    assert "max_tokens" not in harness.model.calls[-1].request


async def test_each_endpoint_adds_its_own_and_the_record_says_what_was_asked(
    two: tuple[GatewayHarness, ModelServer],
) -> None:
    harness, second = two
    body = {"temperature": 0.3, "top_p": 0.5, "chat_template_kwargs": {"enable_thinking": False}}
    first = harness.model.entry("policy", max_tokens=7, extra_body={"top_k": 1})
    harness.proxy.update_model_list([first, second.entry("policy", max_tokens=33, extra_body=body)])
    attempt = await attempt_at(harness, harness.model)
    harness.model.faults.append(Fault(503))
    assert (await harness.ask(of=attempt, temperature=1.0))[0] == 200
    assert (harness.model.calls[0].request["max_tokens"], harness.model.calls[0].request["top_k"]) == (7, 1)
    upstream_request = second.calls[0].request
    assert {name: upstream_request[name] for name in body} == body
    assert (upstream_request["max_tokens"], "top_k" in upstream_request) == (33, False)
    request = (await harness.spans(attempt))[0].attributes
    settings = ("temperature", "top_p", "max_tokens")
    assert [request[f"gen_ai.request.{name}"] for name in settings] == [0.3, 0.5, 33]
    assert (await harness.raw(attempt))[0]["constrained_by"] == ["top_p"]


async def test_anthropics_messages_get_the_body_too_translated_or_not(harness: GatewayHarness) -> None:
    attempt, body = await harness.attempt(), {**HI, "max_tokens": 9}
    for dialects in (["chat/completions"], ["messages"]):
        entry = harness.model.entry("policy", dialects=dialects, max_tokens=33, extra_body={"top_k": 4})
        harness.proxy.update_model_list([entry])
        assert (await harness.post(harness.url("/v1/messages", of=attempt), body))[0] == 200
        request = harness.model.calls[-1].request
        assert (request["top_k"], request.get("max_tokens", request.get("max_completion_tokens"))) == (4, 9)


# --- extra_headers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("route", "body", "dialects"),
    [
        ("/v1/chat/completions", {"messages": HI["messages"]}, None),
        ("/v1/chat/completions", {"messages": HI["messages"], "stream": True}, None),
        ("/v1/completions", {"prompt": "hi"}, None),
        ("/v1/embeddings", {"input": "hi"}, None),
        ("/v1/messages", {"messages": HI["messages"], "max_tokens": 9}, ["messages"]),
        ("/v1/responses", {"input": "hi"}, ["responses"]),
        ("/v1/messages/count_tokens", {"messages": HI["messages"]}, None),
    ],
)
async def test_headers_go_out_with_every_request(
    harness: GatewayHarness, route: str, body: Any, dialects: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUR_TENANT", TENANT)
    headers = {"X-Tenant": "os.environ/OUR_TENANT", "User-Agent": "our agents/1", "anthropic-beta": "ours"}
    chosen = {} if dialects is None else {"dialects": dialects}
    harness.proxy.update_model_list([harness.model.entry("policy", extra_headers=headers, **chosen)])
    url = harness.url(route)
    async with harness.session.post(url, json={"model": "policy", **body}, headers={"anthropic-beta": "its"}) as reply:
        assert reply.status == 200
        await reply.read()
    sent = harness.model.calls[-1].headers
    assert (sent["x-tenant"], sent["user-agent"], sent["anthropic-beta"]) == (TENANT, "our agents/1", "ours")


async def test_headers_go_out_with_questions_of_what_serves_and_of_health() -> None:
    checks = HealthChecks(failures=1, interval_seconds=0.02, rest_seconds=600.0, longest_rest_seconds=600.0)
    async with ModelServer() as second, GatewayHarness(health=checks) as harness:
        engine_entry, unknown = (
            harness.model.entry(name, extra_headers={"X-Tenant": TENANT}, **engine)
            for name, engine in (("policy", {"engine": "vllm"}), ("other", {}))
        )
        harness.proxy.update_model_list([engine_entry, second.entry("policy"), unknown])
        harness.model.faults = [Fault(500)]
        attempt = await attempt_at(harness, harness.model)
        assert (await harness.ask(of=attempt))[0] == 200
        assert (await harness.ask(of=attempt, model="other"))[0] == 200
        await until(lambda: len(harness.model.get_headers) == 2)
        assert {path: sent["x-tenant"] for path, sent in harness.model.get_headers.items()} == {
            "/v1/models": TENANT,
            "/health": TENANT,
        }


async def test_a_header_is_kept_from_agents_records_and_logs(
    harness: GatewayHarness, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    headers, body = (
        {"X-Login": f"Basic {TENANT}", "X-Title": "weather agent"},
        {"provider": {"api_key": "body-planted"}},
    )
    harness.proxy.update_model_list([harness.model.entry("policy", extra_headers=headers, extra_body=body)])
    error_body = json.dumps({"error": {"message": f"refused: Basic {TENANT}, {TENANT}, body-planted"}}).encode()
    harness.model.faults = [Fault(400, error_body)]
    harness.model.answer = lambda request: f"the weather agent says {TENANT}"
    answers = [await harness.ask() for _ in range(2)]
    assert [status for status, _ in answers] == [400, 200]
    assert answers[1][1]["choices"][0]["message"]["content"] == "the weather agent says [redacted]"
    spans = "".join(span.model_dump_json() for span in await harness.spans())
    shown = json.dumps(answers) + spans + caplog.text + repr(ModelTable(harness.proxy.model_list).all_endpoints)
    assert TENANT not in shown
    assert "body-planted" not in shown


# --- wrong values ----------------------------------------------------------------------------------------------------

WRONG: list[tuple[str, Any, str]] = [
    *[("timeout", value, "must be a number of seconds, above 0; got") for value in (0, -1, float("nan"), "3", True)],
    ("stream_timeout", float("inf"), "must be a number of seconds, above 0; got inf"),
    *[("weight", value, "must be a number above 0; got") for value in (0, -1, float("nan"), float("inf"), "3", True)],
    *[("max_tokens", value, "must be a whole number of 1 or more; got") for value in (0, -1, 2.0, "3", True)],
    ("extra_headers", ["X-A: b"], "must be a dict; got list"),
    ("extra_headers", {"X-A": 1}, "X-A must be a non-empty string; got int"),
    ("extra_headers", {"X A": "b"}, "'X A' is not a valid name of an HTTP header"),
    ("extra_headers", {"X-A\r\nX-B": "b"}, "is not a valid name of an HTTP header"),
    ("extra_headers", {1: "b", "": "b"}, "'' is not a valid name of an HTTP header"),
    ("extra_headers", {"X-A": f"{TENANT}\r\nX-B: c"}, "X-A cannot be sent in an HTTP header: it has a space at"),
    ("extra_headers", {"X-A": f"{TENANT} "}, "X-A cannot be sent in an HTTP header"),
    ("extra_headers", {"X-A": f"{TENANT}\xfc"}, "X-A cannot be sent in an HTTP header"),
    ("extra_headers", {"X-A": "os.environ/NOT_SET_AT_ALL"}, "refers to the environment variable NOT_SET_AT_ALL"),
    ("extra_headers", {"X-A": "b", "x-a": "c"}, "x-a is set twice"),
    ("extra_headers", {"Authorization": TENANT}, "Authorization must not be set: pass the server's key as api_key"),
    ("extra_headers", {"X-API-Key": TENANT}, "X-API-Key must not be set: pass the server's key as api_key"),
    *[("extra_headers", {name: "1"}, f"{name} must not be set: the gateway sets it for each request") for name in (
        "Content-Length", "Transfer-Encoding", "Host", "Connection", "Content-Type", "X-Agl-Attempt")],
    ("extra_body", [1], "must be a dict; got list"),
    *[("extra_body", {name: 1}, f"extra_body.{name} must not be set: only the agent and the gateway") for name in (
        "model", "messages", "prompt", "input", "stream", "n", "logprobs", "return_token_ids")],
    ("extra_body", {"top_k": float("nan")}, "extra_body must be JSON"),
    ("extra_body", {"top_k": object()}, "extra_body must be JSON"),
    ("extra_body", {"a": {"b": "os.environ/SOME_KEY"}}, "does not support 'os.environ/NAME': pass a secret"),
    ("timeouts", 3, "timeouts is not supported; did you mean 'timeout'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_a_wrong_value_is_refused_by_its_place_and_never_shows_a_header(name: str, value: Any, message: str) -> None:
    has_litellm = importlib.util.find_spec("litellm") is not None and name != "timeouts"  # which would be LiteLLM's own
    for engine in (None, "litellm") if has_litellm else (None,):
        parameters = {"model": "openai/m", "api_base": "http://127.0.0.1:1/v1", "engine": engine, name: value}
        with pytest.raises(ValueError, match=r"^model_list\[0\]\.litellm_params\.") as caught:
            LLMProxy(model_list=[{"model_name": "policy", "litellm_params": parameters}])
        assert message in str(caught.value)
        assert TENANT not in str(caught.value)


def test_without_settings_nothing_is_added() -> None:
    endpoint = ModelEndpoint("m", "http://127.0.0.1:1/v1")
    request: dict[str, Any] = {"messages": [], "max_tokens": 3}
    assert endpoint.completed(request, ("max_tokens",)) is request
    assert (endpoint.seconds(streamed=True), endpoint.seconds(streamed=False)) == (None, None)
