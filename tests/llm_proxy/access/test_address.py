"""Addresses as clients make them: Azure's paths, too many slashes, a version twice."""

from __future__ import annotations

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.llm_proxy.access.address import ROUTES, CallAddress, dialect_of, parse_address
from agentlightning.llm_proxy.replies import CallFailed
from tests.llm_proxy.harness import REQUESTS, GatewayHarness

HI = [{"role": "user", "content": "hi"}]


async def test_azures_client_finds_every_route(harness: GatewayHarness) -> None:
    client = openai.AsyncAzureOpenAI(
        azure_endpoint=harness.url(""), api_key="none", api_version="2026-01-01", max_retries=0
    )
    async with client:
        chat = await client.chat.completions.create(model="policy", messages=HI)
        assert chat.choices[0].message.content == "you said hi"
        async with client.chat.completions.stream(model="policy", messages=HI) as stream:
            assert (await stream.get_final_completion()).choices[0].message.content == "you said hi"
        text = await client.completions.create(model="policy", prompt="hi")
        assert text.choices[0].text == "you said hi"
        assert (await client.embeddings.create(model="policy", input="hi")).data
        response = await client.responses.create(model="policy", input="hi")
        assert (await client.responses.retrieve(response.id)).output_text == "you said hi"
        assert [model.id async for model in client.models.list()] == ["policy"]
    assert (await harness.states()) == ["ok", "ok", "ok", "no_generation", "ok"]


async def test_the_model_in_azures_path_is_the_one_that_answers(harness: GatewayHarness) -> None:
    names = ("policy", "org/policy-2")
    harness.proxy.update_model_list([harness.model.entry(name) for name in names])
    for name in names:
        for body in ({"messages": HI}, {"messages": HI, "model": "gpt-4o"}):
            for path in (name, name.replace("/", "%2F")):
                url = harness.url(f"/openai/deployments/{path}/chat/completions?api-version=2024-10-21")
                status, reply = await harness.post(url, body)
                assert (status, reply["model"]) == (200, name)
    status, reply = await harness.post("/openai/deployments/nobody/chat/completions", {"messages": HI})
    assert (status, reply["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "tail",
    [
        "/chat/completions",
        "/v1/chat%2Fcompletions",
        "/v1/v1/chat/completions",
        "//v1//chat//completions",
        "/v1/chat/completions/",
        "/chat/completions//",
        "/openai/v1/chat/completions?api-version=preview",
        "/openai/v1/v1/chat/completions/",
    ],
)
async def test_slashes_too_many_and_a_version_twice_are_passed_over(harness: GatewayHarness, tail: str) -> None:
    status, reply = await harness.post(harness.url(tail), {"model": "policy", "messages": HI})
    assert (status, reply["object"]) == (200, "chat.completion")


@pytest.mark.parametrize("prefix", ["", "/v1", "/role/solver/v1"])
async def test_a_path_without_an_attempt_belongs_to_the_gateways_own_attempt_or_is_refused(prefix: str) -> None:
    policies = {"main": {"kind": "trained", "roles": ["solver"]}}
    async with GatewayHarness(policies=policies if prefix.startswith("/role/") else None) as harness:
        base = f"{harness.proxy.server_launcher.access_endpoint}{prefix}"
        for is_own in (False, True):
            harness.proxy.default_attempt = harness.ids if is_own else None
            for route, body in REQUESTS.items():
                status, reply = await harness.post(f"{base}/{route}", body)
                assert status == (200 if is_own else 404)
                assert is_own or "does not name an attempt" in reply["error"]["message"]
            async with harness.session.get(f"{base}/models") as reply:
                assert reply.status == (200 if is_own else 404)
        assert (await harness.states()) == ["ok", "ok", "no_generation", "ok", "ok"]
        status, reply = await harness.post(f"{base}/rollout/ro-1/chat/completions", REQUESTS["chat/completions"])
        assert status == 404


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("agl", 401), ("the token", 200), ("the attempt's", 200)])
async def test_a_path_without_an_attempt_requires_the_key_of_the_own_attempt_or_the_token(
    monkeypatch: pytest.MonkeyPatch, key: str | None, status: int
) -> None:
    monkeypatch.setenv("AGL_TOKEN", "server-token-0123456789")
    async with GatewayHarness() as harness:
        harness.proxy.default_attempt = harness.ids
        own = harness.proxy.as_resource(*harness.ids).api_key
        key = {"the token": "server-token-0123456789", "the attempt's": own}.get(str(key), key)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        url = f"{harness.proxy.server_launcher.access_endpoint}/v1/chat/completions"
        assert (await harness.post(url, REQUESTS["chat/completions"], **headers))[0] == status


async def test_another_dialects_refusal_has_its_form_below_such_a_path_too(harness: GatewayHarness) -> None:
    status, reply = await harness.post("/anthropic//v1//messages/", {"model": "policy"})
    assert (status, reply["type"]) == (400, "error")


SEGMENTS = st.sampled_from(
    [
        "v1",
        "openai",
        "anthropic",
        "deployments",
        "chat",
        "completions",
        "responses",
        "models",
        "policy",
        "",
        "..",
        "%2F",
    ]
) | st.text(alphabet="ab/%2Fé ", max_size=4)


@given(st.lists(SEGMENTS, max_size=8), st.sampled_from(["GET", "POST", "DELETE"]))
def test_any_path_is_an_address_or_is_refused_in_words(segments: list[str], method: str) -> None:
    path = "/".join(["/rollout/r/attempt/a", *segments]).encode()
    assert dialect_of(path)
    refused: CallFailed | None = None
    address: CallAddress | None = None
    try:
        address = parse_address(path, method)
    except CallFailed as failure:
        refused = failure
    if address is None:
        assert refused is not None
        assert refused.status in (404, 405)
        return
    assert (address.rollout_id, address.attempt_id) == ("r", "a")
    assert method in ROUTES[address.route]
    assert address.named != ""


def test_no_path_reaches_another_attempt() -> None:
    for tail in (b"/../../attempt/b/chat/completions", b"/v1/rollout/x/attempt/b/chat/completions"):
        with pytest.raises(CallFailed):
            parse_address(b"/rollout/r/attempt/a" + tail, "POST")


@pytest.mark.parametrize("segment", [b"a/", b"v1/"])
def test_a_path_is_read_in_a_time_that_grows_as_its_length(segment: bytes) -> None:
    long = b"/rollout/r/attempt/a/deployments/" + segment * 200_000
    for path in (long, long.replace(b"deployments/", b"")):  # each segment with all others would take minutes
        with pytest.raises(CallFailed):
            parse_address(path + b"x", "POST")


@pytest.mark.parametrize("tail", ["", "/input_items"])
async def test_the_sign_for_a_name_in_our_list_of_routes_is_a_name_like_any_other(
    harness: GatewayHarness, tail: str
) -> None:
    for prefix in ("/v1", "/openai/deployments/policy"):
        async with harness.session.get(harness.url(f"{prefix}/responses/%3Cid%3E{tail}")) as reply:
            assert reply.status == 404
