"""Planted keys appear in no span, log, error or reply."""

from __future__ import annotations

import json
import logging

import pytest

from agentlightning import process_secrets
from agentlightning.llm_proxy import LLMProxy
from agentlightning.types.attempt_key import attempt_key
from tests.llm_proxy.harness import GatewayHarness
from tests.stubs.model_server import Fault

PROVIDER_KEY = "sk-provider-planted-0123456789"
AGENT_SECRET = "agent-header-planted-0123456789"
TOKEN = "server-token-planted-0123456789"


async def test_no_secret_leaves_the_gateway(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("AGL_TOKEN", TOKEN)
    caplog.set_level(logging.DEBUG)
    logging.getLogger("aiohttp").setLevel(logging.DEBUG)
    replies: list[str] = []
    async with GatewayHarness() as harness:
        harness.proxy.update_model_list([harness.model.entry("policy", api_key=PROVIDER_KEY)])
        attempt = await harness.attempt()
        own_key = attempt_key(attempt.rollout_id, attempt.attempt.attempt_id)
        leaky = json.dumps({"error": {"message": f"wrong key {PROVIDER_KEY} in Bearer {PROVIDER_KEY}"}}).encode()
        echoed = json.dumps({"id": "x", "choices": [{"message": {"content": PROVIDER_KEY}}]}).encode()
        faults = [None, Fault(401, leaky), Fault(400, leaky), Fault(418, PROVIDER_KEY.encode()), Fault(body=echoed)]
        for fault in [*faults, Fault(body=PROVIDER_KEY.encode()), Fault(cut="middle")]:
            if fault:
                harness.model.faults.append(fault)
            headers = {"Authorization": f"Bearer {own_key}", "X-Secret": AGENT_SECRET, "Cookie": AGENT_SECRET}
            body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
            replies.append(json.dumps(await harness.post(harness.url(attempt), body, **headers)))
        bad_key = f"agl-{attempt.rollout_id}.{attempt.attempt.attempt_id}.{'0' * 32}"
        replies.append(json.dumps(await harness.post(harness.url(attempt), {}, Authorization=f"Bearer {bad_key}")))

        assert harness.model.calls[0].headers["authorization"] == f"Bearer {PROVIDER_KEY}"
        assert all(AGENT_SECRET not in str(call.headers) for call in harness.model.calls)
        assert all(own_key not in str(call.headers) for call in harness.model.calls)
        spans = await harness.spans(attempt)
        assert len(spans) == 14
        shown = "".join(
            [span.model_dump_json() for span in spans] + replies + [caplog.text, repr(harness.proxy.stats())]
        )
        for secret in (PROVIDER_KEY, AGENT_SECRET, TOKEN, own_key, bad_key):
            assert secret not in shown, secret


def test_a_wrong_model_entry_is_named_without_its_key() -> None:
    entry = {"model_name": "m", "litellm_params": {"model": "m", "api_base": "nowhere", "api_key": PROVIDER_KEY}}
    with pytest.raises(ValueError, match=r"model_list\[0\]\.litellm_params\.api_base") as caught:
        LLMProxy(model_list=[entry])  # pyright: ignore[reportArgumentType] -- the point of the test
    assert PROVIDER_KEY not in str(caught.value)


async def test_a_provider_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PROVIDER_KEY", PROVIDER_KEY)
    async with GatewayHarness() as harness:
        harness.proxy.update_model_list([harness.model.entry("policy", api_key="os.environ/MY_PROVIDER_KEY")])
        await harness.ask(await harness.attempt())
        assert harness.model.calls[0].headers["authorization"] == f"Bearer {PROVIDER_KEY}"
        process_secrets.forget()
        with pytest.raises(ValueError, match="environment variable MY_PROVIDER_KEY, which is not set"):
            harness.proxy.update_model_list([harness.model.entry("policy", api_key="os.environ/MY_PROVIDER_KEY")])
