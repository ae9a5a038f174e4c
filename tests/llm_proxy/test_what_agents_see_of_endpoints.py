"""An agent sees only the host and the port of a model server; credentials in addresses are refused."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
from typing import Any

import pytest

from agentlightning.llm_proxy import LLMProxy
from agentlightning.llm_proxy.endpoints.table import ModelTable
from tests.llm_proxy.harness import REQUESTS, GatewayHarness
from tests.stubs.model_server import Fault

SECRET = "planted-0123456789"
WRONG_BASES = {
    "user and password": f"http://agent:{SECRET}@127.0.0.1:8000/v1",
    "a user": f"http://{SECRET}@127.0.0.1:8000/v1",
    "a password": f"http://:{SECRET}@127.0.0.1:8000/v1",
    "a key in the query": f"https://127.0.0.1:8000/v1?api_key={SECRET}",
    "a query": f"https://127.0.0.1:8000/v1?{SECRET}",
    "a fragment": f"https://127.0.0.1:8000/v1#{SECRET}",
    "a space": f"http://127.0.0.1:8000/v1 {SECRET}",
    "a line break": f"http://127.0.0.1:8000/v1\n{SECRET}",
    "a port that is none": f"http://127.0.0.1:{SECRET}/v1",
    "brackets": f"http://[{SECRET}/v1",
    "another scheme": f"ftp://{SECRET}/v1",
}


@pytest.mark.parametrize("engine", [None, "vllm", "litellm"])
@pytest.mark.parametrize("case", WRONG_BASES)
def test_an_address_that_holds_more_than_a_place_is_refused_without_showing_it(
    case: str, engine: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", str)  # LiteLLM itself is not asked
    parameters: dict[str, Any] = {"model": "m", "api_base": WRONG_BASES[case], **({"engine": engine} if engine else {})}
    with pytest.raises(ValueError, match=r"^model_list\[0\]\.litellm_params\.api_base ") as caught:
        LLMProxy(model_list=[{"model_name": "m", "litellm_params": parameters}])
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(caught.value.__cause__)
    if "key" in case or "password" in case:
        assert "api_key" in str(caught.value)


@pytest.mark.parametrize("place", ["entry", "environment"])
@pytest.mark.parametrize("key", [f"{SECRET}\n", f"{SECRET}\r\nX-Other: 1", f" {SECRET}", f"{SECRET}\0", f"{SECRET}é"])
def test_a_key_that_no_header_can_hold_is_refused_without_showing_it(
    key: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "environment":
        if "\0" in key:
            pytest.skip("no environment holds it")
        monkeypatch.setenv("MY_PROVIDER_KEY", key)
        assert os.environ["MY_PROVIDER_KEY"] == key
    value = key if place == "entry" else "os.environ/MY_PROVIDER_KEY"
    with pytest.raises(ValueError, match=r"model_list\[0\]\.litellm_params\.api_key") as caught:
        ModelTable([{"model_name": "m", "litellm_params": {"model": "m", "api_base": "http://h/v1", "api_key": value}}])
    assert SECRET not in str(caught.value)


def test_a_setting_of_litellm_with_credentials_in_an_address_is_refused_without_showing_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", str)  # LiteLLM itself is not asked
    parameters = {"model": "m", "engine": "litellm", "aws_sts_endpoint": f"https://u:{SECRET}@127.0.0.1/"}
    with pytest.raises(ValueError, match="aws_sts_endpoint") as caught:
        ModelTable([{"model_name": "m", "litellm_params": parameters}])
    assert SECRET not in str(caught.value)


HIDDEN = "hidden-path-0123456789"
"""Part of the path of an endpoint's address, where some providers have an account's number."""


async def test_no_failure_of_an_upstream_shows_more_than_its_place(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    redirect = Fault(307, b"", {"Location": f"http://127.0.0.1:9/{HIDDEN}"})
    faults = [None, redirect, Fault(200, b"no JSON"), Fault(404, b""), Fault(405, b"{}"), Fault(cut="before")]
    async with GatewayHarness() as harness:
        bases = {
            "serves": f"http://127.0.0.1:{harness.model.port}/{HIDDEN}",
            "nobody": f"http://127.0.0.1:9/{HIDDEN}",
            "no_name": f"http://no-such-host.invalid/{HIDDEN}",
        }
        spoken = (("", ["chat/completions", "completions", "embeddings"]), ("-native", ["messages", "responses"]))
        entries = [
            harness.model.entry(name + kind, api_base=base, dialects=dialects)
            for name, base in bases.items()
            for kind, dialects in spoken
        ]
        harness.proxy.update_model_list(entries)

        async def say(model: str, route: str) -> str:
            body = {**REQUESTS[route], "model": model}
            async with harness.session.post(harness.url(f"/{route}"), json=body, allow_redirects=False) as answer:
                return f"{answer.status} {dict(answer.headers)} {await answer.text()}"

        names = [name + kind for name in bases for kind, _ in spoken]
        lost = [say(name, route) for name in names if not name.startswith("serves") for route in REQUESTS]
        answers = list(await asyncio.gather(*lost))
        for fault in faults:
            for route in REQUESTS:
                harness.model.faults[:] = [fault] * 2 if fault is not None else []
                answers += [await say("serves", route), await say("serves-native", route)]
        async with harness.session.get(harness.url("/models")) as listing:
            answers.append(await listing.text())
        shown = "\n".join([*answers, json.dumps(harness.proxy.stats()), caplog.text])
        shown += "".join(span.model_dump_json() for span in await harness.spans())
    assert any(line.startswith("501") for line in answers)
    assert f":{harness.model.port}" in shown
    assert HIDDEN not in shown
