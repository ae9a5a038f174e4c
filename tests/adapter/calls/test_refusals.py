"""Calls that were refused for good: judged by a real gateway's records of a program's requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from agentlightning.adapter.calls.calls import model_calls
from agentlightning.adapter.calls.refusals import refused_for_good
from agentlightning.llm_proxy import GatewayLimits
from tests.llm_proxy.harness import GatewayHarness, until
from tests.stubs.model_server import Fault

U1, A1, U2 = (
    {"role": "user", "content": "six times seven"},
    {"role": "assistant", "content": "42"},
    {"role": "user", "content": "and nine?"},
)
REFUSED: dict[str, Any] = {"model": "gpt-unknown"}
"""The gateway refuses a model that it does not have, for any messages."""


@pytest.fixture
async def gateway(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[GatewayHarness, None]:
    monkeypatch.delenv("AGL_TOKEN", raising=False)
    async with GatewayHarness(num_retries=0) as ready:
        yield ready


async def _say(gateway: GatewayHarness, *messages: Any, **fields: Any) -> int:
    body = {"model": "policy", "messages": list(messages), **fields}
    if not fields.get("stream"):
        return (await gateway.post("/chat/completions", body))[0]
    async with gateway.session.post(gateway.url(), json=body) as reply:
        await reply.read()
        return reply.status


async def _refused(gateway: GatewayHarness) -> list[str]:
    """Return the states of the calls that were refused for good."""
    return [call.state for call in refused_for_good(model_calls(await gateway.spans()))]


async def test_a_refusal_that_nothing_follows_is_for_good(gateway: GatewayHarness) -> None:
    assert await _say(gateway, U1, **REFUSED) == 404
    assert await _refused(gateway) == ["refused"]


async def test_an_answer_to_another_turn_does_not_make_up_for_it(gateway: GatewayHarness) -> None:
    assert await _say(gateway, U1) == 200
    assert await _say(gateway, U1, A1, U2, **REFUSED) == 404
    assert await _say(gateway, {"role": "user", "content": "something else"}) == 200
    assert await _refused(gateway) == ["refused"]


async def test_an_answer_before_the_refusal_does_not_make_up_for_it(gateway: GatewayHarness) -> None:
    assert await _say(gateway, U1) == 200
    assert await _say(gateway, U1, **REFUSED) == 404
    assert await _refused(gateway) == ["refused"]


@pytest.mark.parametrize(
    "again",
    [
        [U1, A1, U2],
        [{"role": "system", "content": "Answer in JSON: {...}"}, U1, A1, U2],
        [U1, A1, {"role": "user", "content": "and nine?\n\nAnswer in JSON: {...}"}],
        [U1, A1, U2, {"role": "user", "content": "Answer in JSON: {...}"}],
    ],
    ids=["without the field", "a system message", "at the end of the last message", "a message more"],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_fallback_of_the_same_turn_makes_up_for_it(
    gateway: GatewayHarness, again: list[Any], streamed: bool
) -> None:
    assert await _say(gateway, U1, A1, U2, stream=streamed, **REFUSED) == 404
    assert await _say(gateway, *again, stream=streamed) == 200
    assert await _refused(gateway) == []


async def test_a_fallback_after_a_field_that_the_engine_refuses_makes_up_for_it(gateway: GatewayHarness) -> None:
    gateway.model.refused_fields = ("response_format",)
    assert await _say(gateway, U1, response_format={"type": "json_object"}) == 400
    assert await _refused(gateway) == ["upstream_error"]
    assert await _say(gateway, U1) == 200
    assert await _refused(gateway) == []


async def test_the_next_turn_is_not_the_same_one(gateway: GatewayHarness) -> None:
    assert await _say(gateway, U1, **REFUSED) == 404
    assert await _say(gateway, U1, {"role": "assistant", "content": ""}, U2) == 200
    assert await _refused(gateway) == ["refused"]


async def test_a_refusal_that_the_model_server_gave_counts_like_one_of_the_gateway(gateway: GatewayHarness) -> None:
    gateway.model.faults.append(Fault(400))
    assert await _say(gateway, U1) == 400
    assert await _refused(gateway) == ["upstream_error"]
    assert await _say(gateway, U1) == 200
    assert await _refused(gateway) == []


@pytest.mark.parametrize(
    "status", [pytest.param(429, marks=pytest.mark.heavy), 500, pytest.param(503, marks=pytest.mark.heavy)]
)
async def test_a_failure_on_the_way_counts_only_if_the_retries_end_in_failure(
    gateway: GatewayHarness, status: int
) -> None:
    gateway.model.faults = [Fault(status)] * 20
    assert [await _say(gateway, U1) for _ in range(2)] == [status, status]
    gateway.model.faults = []
    assert await _refused(gateway) == ["upstream_error", "upstream_error"]
    assert await _say(gateway, U1) == 200
    assert await _refused(gateway) == []


async def test_a_stream_that_breaks_off_gave_no_answer(gateway: GatewayHarness) -> None:
    gateway.model.faults.append(Fault(cut="middle"))
    assert await _say(gateway, U1, stream=True) in (200, 502)
    assert await _refused(gateway) == ["upstream_error"]
    assert await _say(gateway, U1, stream=True) == 200
    assert await _refused(gateway) == []


async def test_a_body_that_cannot_be_read_was_never_answered(gateway: GatewayHarness) -> None:
    assert (await gateway.post("/chat/completions", b"{"))[0] == 400
    assert await _say(gateway, U1) == 200
    assert await _refused(gateway) == ["refused"]


async def test_the_other_dialects_tell_which_turn_was_refused_too(gateway: GatewayHarness) -> None:
    body = {"model": "policy", "input": "six times seven"}
    assert (await gateway.post("/responses", {**body, "include": 1}))[0] == 400
    assert await _refused(gateway) == ["refused"]
    assert (await gateway.post("/responses", body))[0] == 200
    assert await _refused(gateway) == []
    request_body = {"model": "policy", "max_tokens": 9, "messages": [U1]}
    assert (await gateway.post("/messages", {**request_body, "tools": 1}))[0] == 400
    assert await _refused(gateway) == ["refused"]
    assert (await gateway.post("/messages", request_body))[0] == 200
    assert await _refused(gateway) == []


async def test_a_call_past_its_budget_has_a_reason_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGL_TOKEN", raising=False)
    async with GatewayHarness(limits=GatewayLimits(tokens_per_rollout=1)) as gateway:
        assert [await _say(gateway, U1), await _say(gateway, U2)] == [200, 429]
        assert await _refused(gateway) == []


async def test_a_connection_that_the_program_closed_was_not_refused(gateway: GatewayHarness) -> None:
    gateway.model.delay = 5.0
    asking = asyncio.create_task(_say(gateway, U1))
    await until(lambda: gateway.proxy.stats()["in_hand"] == 1)
    asking.cancel()
    await until(lambda: gateway.proxy.stats()["in_hand"] == 0)
    [call] = model_calls(await gateway.spans())
    assert call.state == "client_left"
    assert await _refused(gateway) == []
