"""Model servers that fail: what is tried again, what the agent hears, what the record says."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from typing import Any

import pytest

from agentlightning.llm_proxy import GatewayLimits, upstream
from agentlightning.llm_proxy.upstream import retry_after_seconds
from tests.llm_proxy.desk import Desk, arrived, until
from tests.stubs.model_server import Fault, ModelServer


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real back-off with its unit changed from seconds to milliseconds."""
    real = upstream._pause

    def short(answer: upstream.Answer, tries: int) -> float:
        return real(answer, tries) / 1000

    monkeypatch.setattr(upstream, "_pause", short)


def dead_url() -> str:
    """Return a base URL where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/v1"


def entry(base_url: str) -> Any:
    return {"model_name": "policy", "litellm_params": {"model": "policy", "api_base": base_url}}


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422])
async def test_the_agents_own_errors_pass_unchanged_and_are_not_tried_again(desk: Desk, status: int) -> None:
    said = {"error": {"message": "no such thing", "type": "x", "param": "messages", "code": "y"}, "more": [1]}
    desk.model.faults.append(Fault(status, json.dumps(said).encode()))
    attempt = await desk.attempt()
    assert await desk.ask(attempt) == (status, said)
    [call] = await desk.raw(attempt)
    assert (call["state"], call["http_status"], call["upstream_tries"]) == ("upstream_error", status, 1)
    request_span = (await desk.spans(attempt))[0]
    assert request_span.status.status_code == "ERROR"
    assert "no such thing" in str(request_span.status.description)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_passing_trouble_is_tried_again_and_counted(desk: Desk, status: int) -> None:
    desk.model.faults += [Fault(status), Fault(status)]
    attempt = await desk.attempt()
    assert (await desk.ask(attempt))[0] == 200
    [call] = await desk.raw(attempt)
    assert (call["state"], call["upstream_tries"]) == ("ok", 3)


async def test_a_lasting_trouble_reaches_the_agent_after_four_tries(desk: Desk) -> None:
    desk.model.faults += [Fault(503) for _ in range(9)]
    attempt = await desk.attempt()
    status, body = await desk.ask(attempt)
    assert (status, body["error"]["message"]) == (503, "told to answer 503")
    assert (await desk.raw(attempt))[0]["upstream_tries"] == 4


@pytest.mark.parametrize(("num_retries", "expected"), [(0, 500), (1, 200)])
async def test_a_500_is_tried_again_only_when_asked_for(num_retries: int, expected: int) -> None:
    async with Desk(num_retries=num_retries) as desk:
        desk.model.faults.append(Fault(500))
        attempt = await desk.attempt()
        assert (await desk.ask(attempt))[0] == expected
        assert (await desk.raw(attempt))[0]["upstream_tries"] == num_retries + 1


async def test_retry_after_is_honoured(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    desk.model.faults.append(Fault(429, headers={"Retry-After": "1"}))
    before = time.monotonic()
    assert (await desk.ask(await desk.attempt()))[0] == 200
    assert time.monotonic() - before >= 1.0


async def test_a_wait_longer_than_the_call_may_take_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    async with Desk(limits=GatewayLimits(call_seconds=5.0)) as desk:
        desk.model.faults.append(Fault(429, headers={"Retry-After": "20"}))
        attempt = await desk.attempt()
        body: dict[str, Any] = {"model": "policy", "messages": []}
        async with desk.session.post(desk.url(attempt), json=body) as reply:
            assert reply.status == 429
            assert reply.headers["Retry-After"] == "20"
        assert (await desk.raw(attempt))[0]["upstream_tries"] == 1


def test_retry_after_is_read_in_seconds_and_as_a_date() -> None:
    assert retry_after_seconds("2.5") == 2.5
    assert retry_after_seconds("-1") == 0.0
    assert retry_after_seconds("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert retry_after_seconds("soon") is None
    assert retry_after_seconds(None) is None


async def test_a_server_that_is_not_there_is_502_in_openais_form(caplog: pytest.LogCaptureFixture) -> None:
    async with Desk(model_list=[entry(dead_url())]) as desk:
        attempt = await desk.attempt()
        with caplog.at_level(logging.WARNING):
            status, body = await desk.ask(attempt)
        assert status == 502
        assert "'policy' cannot be reached" in body["error"]["message"]
        assert (await desk.raw(attempt))[0]["upstream_tries"] == 4
    assert len(caplog.records) == 1


GARBAGE = {
    "not JSON": Fault(body=b"<html>"),
    "not an object": Fault(body=b"[]"),
    "no choices": Fault(body=b'{"id": "x"}'),
    "empty choices": Fault(body=b'{"choices": []}'),
    "choices of numbers": Fault(body=b'{"choices": [1]}'),
    "half a reply": Fault(cut="middle"),
    "a redirect": Fault(307, headers={"Location": "http://127.0.0.1:9/"}),
    "nothing": Fault(body=b""),
    "endless": Fault(body=b"[" * 100_000),
}


@pytest.mark.parametrize("case", GARBAGE)
async def test_a_reply_that_cannot_be_used_is_502_and_recorded(desk: Desk, case: str) -> None:
    desk.model.faults.append(GARBAGE[case])
    attempt = await desk.attempt()
    status, body = await desk.ask(attempt)
    assert status == 502
    assert body["error"]["type"] == "server_error"
    [call] = await desk.raw(attempt)
    assert (call["state"], call["upstream_tries"]) == ("upstream_error", 1)
    assert "prompt_token_ids" not in call


async def test_a_connection_cut_before_the_reply_is_tried_once_more(desk: Desk) -> None:
    attempt = await desk.attempt()
    desk.model.faults.append(Fault(cut="before"))
    assert (await desk.ask(attempt))[0] == 200
    desk.model.faults += [Fault(cut="before"), Fault(cut="before")]
    assert (await desk.ask(attempt))[0] == 502
    assert [call["upstream_tries"] for call in await desk.raw(attempt)] == [2, 2]


async def test_an_error_that_is_no_json_keeps_its_status_and_gets_openais_form(desk: Desk) -> None:
    desk.model.faults.append(Fault(418, b"I am a teapot"))
    status, body = await desk.ask(await desk.attempt())
    assert status == 418
    assert "I am a teapot" in body["error"]["message"]


async def test_a_call_that_takes_too_long_is_504_and_the_server_is_left() -> None:
    async with Desk(limits=GatewayLimits(call_seconds=0.2)) as desk:
        desk.model.hold()
        attempt = await desk.attempt()
        status, body = await desk.ask(attempt)
        assert status == 504
        assert "0.2 seconds" in body["error"]["message"]
        await desk.model.until(lambda calls: calls[0].client_left)
        assert await desk.states(attempt) == ["upstream_error"]
        assert desk.proxy.stats()["in_flight"] == 0


@pytest.mark.parametrize(
    ("prompt_ids", "choice"),
    [
        ([1, 2], {"token_ids": ["3"]}),
        ([1, "2"], {"token_ids": [3]}),
        ([], {"token_ids": [3]}),
        ([1, -2], {"token_ids": [3]}),
        (None, {"token_ids": [3]}),
        ([1, 2], {"token_ids": None}),
        ([1.0, 2], {"token_ids": [3]}),
    ],
)
async def test_tokens_that_are_no_token_ids_are_not_recorded_as_tokens(
    desk: Desk, prompt_ids: Any, choice: dict[str, Any]
) -> None:
    reply = {"id": "c", "prompt_token_ids": prompt_ids, "choices": [{"index": 0, **choice}]}
    desk.model.faults.append(Fault(body=json.dumps(reply).encode()))
    attempt = await desk.attempt()
    assert (await desk.ask(attempt))[0] == 200
    [call] = await desk.raw(attempt)
    assert call["state"] == "no_tokens"
    assert not {"prompt_token_ids", "completion_token_ids", "completion_logprobs"} & set(call)


@pytest.mark.parametrize("content", [[{"logprob": -1.0}], [{"logprob": -1.0}, {"logprob": "x"}], "x", None])
async def test_logprobs_that_do_not_fit_the_tokens_are_left_out(desk: Desk, content: Any) -> None:
    choice = {"index": 0, "token_ids": [3, 4], "logprobs": {"content": content}}
    reply = {"id": "c", "prompt_token_ids": [1], "choices": [choice]}
    desk.model.faults.append(Fault(body=json.dumps(reply).encode()))
    attempt = await desk.attempt()
    assert (await desk.ask(attempt))[0] == 200
    [call] = await desk.raw(attempt)
    assert call["completion_token_ids"] == [3, 4]
    assert "completion_logprobs" not in call


# --- several endpoints -------------------------------------------------------------------------------------------


async def test_a_rollout_stays_with_its_endpoint_and_rollouts_are_spread() -> None:
    async with ModelServer() as second, Desk() as desk:
        desk.proxy.update_model_list([desk.model.entry("policy"), second.entry("policy")])
        for _ in range(12):
            attempt = await desk.attempt()
            before = len(desk.model.calls), len(second.calls)
            for _ in range(3):
                await desk.ask(attempt)
            grown = len(desk.model.calls) - before[0], len(second.calls) - before[1]
            assert sorted(grown) == [0, 3]
        assert desk.model.calls
        assert second.calls


async def test_a_dead_endpoint_is_failed_over(caplog: pytest.LogCaptureFixture) -> None:
    async with Desk() as desk:
        desk.proxy.update_model_list([entry(dead_url()), entry(dead_url()), desk.model.entry("policy")])
        for _ in range(8):
            assert (await desk.ask(await desk.attempt()))[0] == 200


async def test_new_models_are_served_without_a_restart_and_calls_in_progress_end_where_they_are(desk: Desk) -> None:
    async with ModelServer(lambda _: "from the second") as second:
        attempt = await desk.attempt()
        desk.model.hold()
        old = asyncio.create_task(desk.ask(attempt))
        await desk.model.until(arrived(1))
        desk.proxy.update_model_list([second.entry("policy"), second.entry("judge")])
        assert (await desk.ask(attempt))[1]["choices"][0]["message"]["content"] == "from the second"
        assert (await desk.ask(attempt, model="judge"))[0] == 200
        desk.model.release()
        assert (await old)[1]["choices"][0]["message"]["content"] == "you said hi there"


# --- the agent leaves --------------------------------------------------------------------------------------------


async def test_an_agent_that_leaves_cancels_the_call_and_leaves_a_span_that_says_so(desk: Desk) -> None:
    attempt = await desk.attempt()
    desk.model.hold()
    call = asyncio.create_task(desk.ask(attempt))
    await desk.model.until(arrived(1))
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await desk.model.until(lambda calls: calls[0].client_left)
    await until(lambda: desk.proxy.stats()["calls"])
    [record] = await desk.raw(attempt)
    assert (record["state"], record["http_status"]) == ("client_left", 499)
    assert "completion_token_ids" not in record
    assert desk.proxy.stats()["in_flight"] == 0
