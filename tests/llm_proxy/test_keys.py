"""Every route in every dialect with every key: who may call, how a refusal reads, and that no key leaks."""

from __future__ import annotations

import itertools
import json
import logging
from typing import Any

import pytest

from agentlightning.base import process_secrets
from agentlightning.llm_proxy import LLMProxy
from agentlightning.types.attempt_key import attempt_key
from tests.llm_proxy.harness import REQUESTS, GatewayHarness
from tests.stubs.model_server import Fault, ModelServer

Json = dict[str, Any]
TOKEN = "server-token-planted-0123456789"
PROVIDER_KEY = "sk-provider-planted-0123456789"
STREAM: Json = {"stream": True}

ROUTES: dict[str, tuple[str, Json | None]] = {
    **{route: (route, request) for route, request in REQUESTS.items()},
    **{
        f"{route}, streamed": (route, REQUESTS[route] | STREAM)
        for route in ("chat/completions", "responses", "messages")
    },
    "input_tokens": ("responses/input_tokens", REQUESTS["responses"]),
    "models": ("models", None),
    "one model": ("models/policy", None),
}
PREFIXES = {"": "", "/v1": "", "/role/solver": "/role/solver"}
"""After the attempt, and before it."""


def presented(own: str, other: str) -> dict[str, tuple[str | None, int, int]]:
    """Key, status without a token on the server, status with one."""
    forged = own[:-1] + ("0" if own[-1] != "0" else "1")
    return {
        "own key": (own, 200, 200),
        "key of another attempt": (other, 403, 403),
        "forged signature": (forged, 403, 403),
        "no key": (None, 200, 401),
        "a placeholder": ("dummy", 200, 401),
        "a provider's key": ("sk-123", 200, 401),
        "the server's token": (TOKEN, 200, 200),
    }


HEADERS = {
    "bearer": lambda key: {"Authorization": f"Bearer {key}"},
    "x-api-key": lambda key: {"x-api-key": key},
    "api-key": lambda key: {"api-key": key},
}


async def call(harness: GatewayHarness, url: str, body: Json | None, headers: dict[str, str]) -> tuple[int, str]:
    method = "GET" if body is None else "POST"
    async with harness.session.request(method, url, json=body, headers=headers) as reply:
        return reply.status, await reply.text()


def has_form_of(route: str, status: int, text: str) -> bool:
    """True if a refusal is in the form of the dialect that the route belongs to."""
    body = json.loads(text)
    if not route.startswith("messages"):
        return set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    kind = {401: "authentication_error", 403: "permission_error"}[status]
    return body["type"] == "error" and body["error"]["type"] == kind and bool(body["error"]["message"])


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("token", [None, TOKEN])
async def test_the_whole_matrix_of_routes_dialects_and_keys(
    monkeypatch: pytest.MonkeyPatch, token: str | None, native: bool
) -> None:
    if token:
        monkeypatch.setenv("AGL_TOKEN", token)
    policies: Any = {"main": {"kind": "trained", "roles": ["solver"]}, "rest": {"kind": "frozen"}}
    every = ["chat/completions", "completions", "embeddings", "responses", "messages"]
    with ModelServer() as model:
        entry = model.entry("policy", api_key=PROVIDER_KEY, **({"dialects": every} if native else {}))
        async with GatewayHarness(model_list=[entry], policies=policies) as harness:
            mine, theirs = await harness.attempt(), await harness.attempt()
            own, other = (attempt_key(a.rollout_id, a.attempt.attempt_id) for a in (mine, theirs))
            base = harness.url("", of=mine)
            wrong: list[str] = []
            for what, (route, body) in ROUTES.items():
                for tail, before in PREFIXES.items():
                    url = base.replace("/rollout/", f"{before}/rollout/") + ("" if before else tail) + f"/{route}"
                    for name, (key, without, with_token) in presented(own, other).items():
                        for header, headers in HEADERS.items():
                            count = len(model.calls)
                            status, text = await call(harness, url, body, {} if key is None else headers(key))
                            expected = with_token if token else without
                            refused = expected != 200
                            good = status == expected and (not refused or has_form_of(route, status, text))
                            if not good or (refused and len(model.calls) != count) or _leaks(text, own, other):
                                wrong.append(
                                    f"{what} below {before or tail or '/'}, {name} as {header}: {status} {text}"
                                )
            assert wrong == []
            if native:
                assert {call.path for call in model.calls} >= {"/v1/messages", "/v1/responses"}
            spans = "".join(span.model_dump_json() for span in await harness.spans(mine))
            assert not _leaks(spans, own, other)
            assert await harness.spans(theirs) == []
            assert not [call for call in model.calls if own in str(call.headers) or TOKEN in str(call.headers)]


@pytest.mark.parametrize("token", [None, TOKEN])
async def test_one_right_key_among_several_passes_and_another_attempts_key_alone_never_does(
    monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    if token:
        monkeypatch.setenv("AGL_TOKEN", token)
    none = 401 if token else 200
    async with GatewayHarness() as harness:
        mine, theirs = await harness.attempt(), await harness.attempt()
        own, other = (attempt_key(a.rollout_id, a.attempt.attempt_id) for a in (mine, theirs))
        url = harness.url(of=mine)
        assert (await call(harness, url, REQUESTS["chat/completions"], {"Authorization": "Basic czNjcmV0"}))[0] == none
        for right, beside in itertools.permutations(HEADERS.values(), 2):
            assert (await call(harness, url, REQUESTS["chat/completions"], beside("dummy") | right(own)))[0] == 200
            status, text = await call(harness, url, REQUESTS["chat/completions"], beside("dummy") | right(other))
            assert (status, json.loads(text)["error"]["code"]) == (403, "wrong_attempt_key")
            assert (await call(harness, url, REQUESTS["chat/completions"], beside("dummy") | right("dummy")))[0] == none


def _leaks(text: str, *keys: str) -> bool:
    return any(key in text for key in (*keys, PROVIDER_KEY, TOKEN))


# --- planted provider keys -------------------------------------------------------------------------------------------

AGENT_SECRET = "agent-header-planted-0123456789"


@pytest.mark.parametrize("case", [case for case, (route, _) in ROUTES.items() if route in REQUESTS])
async def test_a_provider_that_repeats_its_key_does_not_hand_it_on(
    case: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    route, body = ROUTES[case]
    header = "x-api-key" if route.startswith("messages") else "authorization"
    monkeypatch.setenv("AGL_TOKEN", TOKEN)
    caplog.set_level(logging.DEBUG)
    logging.getLogger("aiohttp").setLevel(logging.DEBUG)
    leaky = {"type": "error", "error": {"type": "x", "message": f"wrong key {PROVIDER_KEY}", "code": PROVIDER_KEY}}
    every = ["chat/completions", "completions", "embeddings", "responses", "messages"]
    with ModelServer(answer=lambda request: f"my key is {PROVIDER_KEY} indeed") as model:
        async with GatewayHarness(model_list=[model.entry("policy", api_key=PROVIDER_KEY, dialects=every)]) as harness:
            attempt = await harness.attempt()
            own = attempt_key(attempt.rollout_id, attempt.attempt.attempt_id)
            forged = f"{own[:-32]}{'0' * 32}"
            headers = {"Authorization": f"Bearer {own}", "X-Secret": AGENT_SECRET, "Cookie": AGENT_SECRET}
            faults = [
                Fault(401, json.dumps(leaky).encode()),
                Fault(400, PROVIDER_KEY.encode()),
                Fault(500, json.dumps(leaky).encode()),
                Fault(200, PROVIDER_KEY.encode()),
                Fault(302, headers={"Location": f"http://127.0.0.1:9/{PROVIDER_KEY}"}),
                Fault(cut="middle"),
                Fault(),
            ]
            shown: list[str] = []
            for fault in faults:
                model.faults = [fault]
                shown.append((await call(harness, harness.url(f"/{route}", of=attempt), body, headers))[1])
            shown.append((await call(harness, harness.url(f"/{route}", of=attempt), body, {"x-api-key": forged}))[1])
            assert PROVIDER_KEY in model.calls[0].headers[header]
            sent = "".join(str(call.headers) for call in model.calls)
            assert not [secret for secret in (AGENT_SECRET, own, TOKEN) if secret in sent]
            shown += [span.model_dump_json() for span in await harness.spans(attempt)]
            shown += [caplog.text, repr(harness.proxy.stats()), repr(harness.proxy.model_list[0]["model_name"])]
            assert not [text for text in shown if AGENT_SECRET in text or _leaks(text, own, forged)]


async def test_the_question_what_an_engine_is_shows_no_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with GatewayHarness() as harness:
        harness.model.models = [{"id": "policy", "owned_by": PROVIDER_KEY}]
        harness.proxy.update_model_list([harness.model.entry("policy", api_key=PROVIDER_KEY)])
        assert (await harness.ask())[0] == 200
        spans = "".join(span.model_dump_json() for span in await harness.spans())
    assert PROVIDER_KEY not in spans + caplog.text


# --- secrets ---------------------------------------------------------------------------------------------------------


def test_a_wrong_model_entry_is_named_without_its_key() -> None:
    entry = {"model_name": "m", "litellm_params": {"model": "m", "api_base": "nowhere", "api_key": PROVIDER_KEY}}
    with pytest.raises(ValueError, match=r"model_list\[0\]\.litellm_params\.api_base") as caught:
        LLMProxy(model_list=[entry])  # pyright: ignore[reportArgumentType] -- the point of the test
    assert PROVIDER_KEY not in str(caught.value)


async def test_a_provider_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PROVIDER_KEY", PROVIDER_KEY)
    async with GatewayHarness() as harness:
        harness.proxy.update_model_list([harness.model.entry("policy", api_key="os.environ/MY_PROVIDER_KEY")])
        await harness.ask()
        assert harness.model.calls[0].headers["authorization"] == f"Bearer {PROVIDER_KEY}"
        process_secrets.forget()
        with pytest.raises(ValueError, match="environment variable MY_PROVIDER_KEY, which is not set"):
            harness.proxy.update_model_list([harness.model.entry("policy", api_key="os.environ/MY_PROVIDER_KEY")])
