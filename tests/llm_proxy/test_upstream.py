"""Model servers that fail: what is tried again, what the agent hears, what the record says."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

import pytest

from agentlightning.adapter import LlmProxyTraceToTriplet, TracerTraceToTriplet
from agentlightning.adapter.calls.calls import model_calls
from agentlightning.llm_proxy import GatewayLimits, LLMProxy
from agentlightning.llm_proxy.upstream import http as upstream
from agentlightning.utils.backoff import LONGEST_RETRY_AFTER
from tests.llm_proxy.harness import REQUESTS, GatewayHarness, arrived, until
from tests.stubs.faulty_engine import FaultyEngine, Request, Way
from tests.stubs.model_server import Fault, ModelServer
from tests.stubs.ports import free_port


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real back-off with its unit changed from seconds to milliseconds."""
    real = upstream._pause

    def short(answer: upstream.UpstreamResponse, tries: int) -> float:
        return real(answer, tries) / 1000

    monkeypatch.setattr(upstream, "_pause", short)


def dead_url() -> str:
    """Return a base URL where nobody listens."""
    return f"http://127.0.0.1:{free_port()}/v1"


def entry(base_url: str) -> Any:
    return {"model_name": "policy", "litellm_params": {"model": "policy", "api_base": base_url}}


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422])
async def test_the_agents_own_errors_pass_unchanged_and_are_not_tried_again(
    harness: GatewayHarness, status: int
) -> None:
    error_body = {"error": {"message": "no such thing", "type": "x", "param": "messages", "code": "y"}, "more": [1]}
    harness.model.faults.append(Fault(status, json.dumps(error_body).encode()))
    assert await harness.ask() == (status, error_body)
    [call] = await harness.raw()
    assert (call["state"], call["http_status"], call["upstream_tries"]) == ("upstream_error", status, 1)
    request_span = (await harness.spans())[0]
    assert request_span.status.status_code == "ERROR"
    assert "no such thing" in str(request_span.status.description)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_passing_trouble_is_tried_again_and_counted(harness: GatewayHarness, status: int) -> None:
    harness.model.faults += [Fault(status), Fault(status)]
    assert (await harness.ask())[0] == 200
    [call] = await harness.raw()
    assert (call["state"], call["upstream_tries"]) == ("ok", 3)


async def test_a_lasting_trouble_reaches_the_agent_after_four_tries(harness: GatewayHarness) -> None:
    harness.model.faults += [Fault(503) for _ in range(9)]
    status, body = await harness.ask()
    assert (status, body["error"]["message"]) == (503, "told to answer 503")
    assert (await harness.raw())[0]["upstream_tries"] == 4


@pytest.mark.parametrize(("num_retries", "expected"), [(0, 500), (1, 200)])
async def test_a_500_is_tried_again_only_when_asked_for(num_retries: int, expected: int) -> None:
    async with GatewayHarness(num_retries=num_retries) as harness:
        harness.model.faults.append(Fault(500))
        assert (await harness.ask())[0] == expected
        assert (await harness.raw())[0]["upstream_tries"] == num_retries + 1


async def test_retry_after_is_honoured(harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    harness.model.faults.append(Fault(429, headers={"Retry-After": "1"}))
    before = time.monotonic()
    assert (await harness.ask())[0] == 200
    assert time.monotonic() - before >= 1.0


async def test_a_wait_longer_than_the_call_may_take_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    async with GatewayHarness(limits=GatewayLimits(call_seconds=5.0)) as harness:
        harness.model.faults.append(Fault(429, headers={"Retry-After": "20"}))
        body: dict[str, Any] = {"model": "policy", "messages": []}
        async with harness.session.post(harness.url(), json=body) as reply:
            assert reply.status == 429
            assert reply.headers["Retry-After"] == "20"
        assert (await harness.raw())[0]["upstream_tries"] == 1


async def test_a_server_that_is_not_there_is_502_in_openais_form(caplog: pytest.LogCaptureFixture) -> None:
    async with GatewayHarness(model_list=[entry(dead_url())]) as harness:
        with caplog.at_level(logging.WARNING):
            status, body = await harness.ask()
        assert status == 502
        assert "'policy' cannot be reached" in body["error"]["message"]
        assert "127.0.0.1" not in body["error"]["message"]
        assert (await harness.raw())[0]["upstream_tries"] == 4
    assert len(caplog.records) == 1


async def test_a_call_waits_for_a_server_that_is_started_again() -> None:
    server = ModelServer()
    server.port = free_port()
    patient = entry(f"http://127.0.0.1:{server.port}/v1")
    patient["litellm_params"]["unreachable_seconds"] = 60
    async with GatewayHarness(model_list=[patient]) as harness:
        call = asyncio.ensure_future(harness.ask())
        await asyncio.sleep(0.5)  # longer than the usual tries take here
        assert not call.done()
        async with server:
            assert (await call)[0] == 200
        assert (await harness.raw())[0]["upstream_tries"] > 4


@pytest.mark.parametrize("seconds", [-1, "long", True, float("inf")])
def test_how_long_it_waits_is_a_number_of_seconds(seconds: Any) -> None:
    wrong = entry(dead_url())
    wrong["litellm_params"]["unreachable_seconds"] = seconds
    with pytest.raises(
        ValueError, match=r"model_list\[0\]\.litellm_params\.unreachable_seconds must be a number of sec"
    ):
        LLMProxy(model_list=[wrong])


GARBAGE = {
    "not JSON": Fault(body=b"<html>"),
    "not an object": Fault(body=b"[]"),
    "no choices": Fault(body=b'{"id": "x"}'),
    "empty choices": Fault(body=b'{"choices": []}'),
    "choices of numbers": Fault(body=b'{"choices": [1]}'),
    "half a reply": Fault(cut="middle"),
    "a redirect": Fault(307, headers={"Location": "http://127.0.0.1:9/"}),
    "nothing": Fault(body=b""),
    "an encoding that was not asked for": Fault(headers={"Content-Encoding": "br"}),
    "endless": Fault(body=b"[" * 100_000),
}


@pytest.mark.parametrize("case", GARBAGE)
async def test_a_reply_that_cannot_be_used_is_502_and_recorded(harness: GatewayHarness, case: str) -> None:
    harness.model.faults.append(GARBAGE[case])
    status, body = await harness.ask()
    assert status == 502
    assert body["error"]["type"] == "server_error"
    [call] = await harness.raw()
    assert (call["state"], call["upstream_tries"]) == ("upstream_error", 1)
    assert "prompt_token_ids" not in call


async def test_what_is_no_http_is_not_quoted_to_the_agent() -> None:
    async def say_the_key(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(head.lower().partition(b"authorization: ")[2])
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(say_the_key, "127.0.0.1", 0) as server:
        model = entry(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
        model["litellm_params"]["api_key"] = "sk-of-the-gateway"
        async with GatewayHarness(model_list=[model]) as harness:
            status, body = await harness.ask()
            assert status == 502
            assert "what came is no HTTP answer" in body["error"]["message"]
            assert "sk-of" not in str(body) + str(await harness.spans())


async def test_a_connection_cut_before_the_reply_is_tried_once_more(harness: GatewayHarness) -> None:
    harness.model.faults.append(Fault(cut="before"))
    assert (await harness.ask())[0] == 200
    harness.model.faults += [Fault(cut="before"), Fault(cut="before")]
    assert (await harness.ask())[0] == 502
    assert [call["upstream_tries"] for call in await harness.raw()] == [2, 2]


async def test_an_error_that_is_no_json_keeps_its_status_and_gets_openais_form(harness: GatewayHarness) -> None:
    harness.model.faults.append(Fault(418, b"I am a teapot"))
    status, body = await harness.ask()
    assert status == 418
    assert "I am a teapot" in body["error"]["message"]


async def test_a_call_that_takes_too_long_is_504_and_the_server_is_left() -> None:
    async with GatewayHarness(limits=GatewayLimits(call_seconds=0.2)) as harness:
        harness.model.hold()
        status, body = await harness.ask()
        assert status == 504
        assert "0.2 seconds" in body["error"]["message"]
        await harness.model.until(lambda calls: calls[0].client_left)
        assert await harness.states() == ["upstream_error"]
        assert harness.proxy.stats()["in_flight"] == 0


UNFIT: list[tuple[Any, Any, list[int] | None]] = [
    *((ids, {"token_ids": [3]}, None) for ids in ([1, "2"], [], [1, -2], None, [1.0, 2])),
    *(([1, 2], {"token_ids": ids}, None) for ids in (["3"], None)),
    *(
        ([1], {"token_ids": [3, 4], "logprobs": {"content": content}}, [3, 4])
        for content in ([{"logprob": -1.0}], [{"logprob": -1.0}, {"logprob": "x"}], "x", None)
    ),
]
"""Ids of the prompt, choice, and the ids that are recorded of it."""


@pytest.mark.parametrize(("prompt_ids", "choice", "recorded"), UNFIT)
async def test_what_is_no_token_id_or_no_logprob_of_one_is_not_recorded(
    harness: GatewayHarness, prompt_ids: Any, choice: dict[str, Any], recorded: list[int] | None
) -> None:
    reply = {"id": "c", "prompt_token_ids": prompt_ids, "choices": [{"index": 0, **choice}]}
    harness.model.faults.append(Fault(body=json.dumps(reply).encode()))
    assert (await harness.ask())[0] == 200
    [call] = await harness.raw()
    assert call.get("completion_token_ids") == recorded
    assert "completion_logprobs" not in call
    assert recorded or ("prompt_token_ids" not in call and call["state"] == "no_tokens")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "choice",
    [
        {"token_ids": [999999999, -5]},
        {"token_ids": [1, 2, 3, 4], "logprobs": {"content": [{"token": "x", "logprob": -1.0}]}},
        {"token_ids": [1, 2, 3, 4], "logprobs": {"token_logprobs": [-1.0] * 5}},
    ],
    ids=["a negative id", "one log-probability", "five in a list"],
)
async def test_tokens_that_do_not_fit_are_marked_and_no_adapter_reads_them(
    harness: GatewayHarness, choice: dict[str, Any], streamed: bool
) -> None:
    message = {"role": "assistant", "content": "x"}
    whole = {"index": 0, "finish_reason": "stop", "delta" if streamed else "message": message, **choice}
    reply = json.dumps({"id": "c", "model": "policy", "prompt_token_ids": [1], "choices": [whole]}).encode()
    body = b"data: " + reply + b"\n\ndata: [DONE]\n\n" if streamed else reply
    harness.model.faults.append(
        Fault(body=body, headers={"Content-Type": "text/event-stream" if streamed else "application/json"})
    )
    request = {"model": "policy", "stream": streamed, "messages": [{"role": "user", "content": "hi"}]}
    async with harness.session.post(harness.url(), json=request) as answer:
        assert (answer.status, b'"x"' in await answer.read()) == (200, True)
    assert await harness.states() == ["no_tokens"]
    spans = await harness.spans()
    (triplet,) = TracerTraceToTriplet().adapt(spans)
    assert (triplet.prompt["token_ids"], triplet.response["token_ids"]) == ([], [])
    assert "token_logprobs" not in triplet.response
    assert triplet.metadata["state"] == "no_tokens"
    assert LlmProxyTraceToTriplet().adapt(spans) == []
    (call,) = model_calls(spans)
    assert (call.state, call.has_tokens) == ("no_tokens", False)


# --- several endpoints -------------------------------------------------------------------------------------------


async def test_a_dead_endpoint_is_failed_over(caplog: pytest.LogCaptureFixture) -> None:
    async with GatewayHarness() as harness:
        harness.proxy.update_model_list([entry(dead_url()), entry(dead_url()), harness.model.entry("policy")])
        for _ in range(8):
            assert (await harness.ask(of=await harness.attempt()))[0] == 200


REPLICA_FAULTS = [*({"status": status} for status in (500, 502, 503, 504)), {"cut": "before"}]


@pytest.mark.parametrize(
    ("fault", "stream"),
    [*((fault, stream) for fault in REPLICA_FAULTS for stream in (False, True)), ({"cut": "middle"}, False)],
    ids=str,
)
async def test_a_replica_that_fails_is_left_for_another(fault: dict[str, Any], stream: bool) -> None:
    async with ModelServer() as second, GatewayHarness(num_retries=0) as harness:
        harness.proxy.update_model_list([harness.model.entry("policy"), second.entry("policy")])
        while len(harness.model.calls) < 2:  # an attempt's id decides which of them is asked first
            harness.model.faults = [Fault(**fault)] * 9
            attempt = await harness.attempt()
            body = {"model": "policy", "stream": stream, "messages": [{"role": "user", "content": "hi"}]}
            async with harness.session.post(harness.url(of=attempt), json=body) as reply:
                assert (reply.status, b"said" in await reply.read()) == (200, True)
            assert await harness.states(attempt) == ["ok"]


async def test_replicas_that_all_fail_are_asked_once_each() -> None:
    async with ModelServer() as second, GatewayHarness(num_retries=0) as harness:
        harness.proxy.update_model_list([harness.model.entry("policy"), second.entry("policy")])
        for fault in (Fault(500), Fault(cut="before")):
            harness.model.faults, second.faults = [fault] * 9, [fault] * 9
            before = len(harness.model.calls) + len(second.calls)
            assert (await harness.ask(of=await harness.attempt()))[0] in (500, 502)
            assert len(harness.model.calls) + len(second.calls) - before == 2


async def test_new_models_are_served_without_a_restart_and_calls_in_progress_end_where_they_are(
    harness: GatewayHarness,
) -> None:
    async with ModelServer(lambda _: "from the second") as second:
        harness.model.hold()
        old = asyncio.create_task(harness.ask())
        await harness.model.until(arrived(1))
        harness.proxy.update_model_list([second.entry("policy"), second.entry("judge")])
        assert (await harness.ask())[1]["choices"][0]["message"]["content"] == "from the second"
        assert (await harness.ask(model="judge"))[0] == 200
        harness.model.release()
        assert (await old)[1]["choices"][0]["message"]["content"] == "you said hi there"


# --- the agent leaves --------------------------------------------------------------------------------------------


async def test_an_agent_that_leaves_cancels_the_call_and_leaves_a_span_that_says_so(harness: GatewayHarness) -> None:
    harness.model.hold()
    call = asyncio.create_task(harness.ask())
    await harness.model.until(arrived(1))
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await harness.model.until(lambda calls: calls[0].client_left)
    await until(lambda: harness.proxy.stats()["calls"])
    [record] = await harness.raw()
    assert (record["state"], record["http_status"]) == ("client_left", 499)
    assert "completion_token_ids" not in record
    assert harness.proxy.stats()["in_flight"] == 0


# --- headers of requests to engines ----------------------------------------------------------------------------------


VALUES = (
    *("inf", "Infinity", "-inf", "nan", "-1", "-0", "1e400", "1e308", "9" * 400, "0x10", "1_0", "", "soon", "\x80\xff"),
    *("Fri, 31 Dec 9999 23:59:59 GMT", "Mon, 01 Jan 0001 00:00:00 +2359", "Wed, 21 Oct 2015 07:28:00 GMT"),
    *("Fri, 31 Dec 99999 23:59:59 GMT", "Fri, 31 Foo 2030 25:61:61 GMT", ",,,", "Thu, 1 Jan 1970 00:00:00 +999999999"),
)


def answers(value: str) -> Way:
    """Return a way that is busy and says for how long. A 400 with the header is not tried again, so it is quick."""
    error = json.dumps({"error": {"message": "busy"}}).encode()

    async def way(request: Request) -> None:
        head = f"HTTP/1.1 400 Stub\r\nContent-Type: application/json\r\nRetry-After: {value}\r\n"
        await request.send(head.encode("latin-1") + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(error))
        await request.send(error)

    return way


async def test_every_call_that_an_engine_puts_off_is_recorded_and_answered_in_its_own_form() -> None:
    with FaultyEngine({f"m{number}": answers(value) for number, value in enumerate(VALUES)}) as engine:
        dialects = ["chat/completions", "completions", "embeddings"]
        entries = [engine.entry(name, dialects=dialects, engine="vllm") for name in engine.ways]
        entries += [{**entry, "model_name": f"{entry['model_name']}-native"} for entry in entries]
        for entry in entries[len(VALUES) :]:
            entry["litellm_params"] = {**entry["litellm_params"], "dialects": ["messages", "responses"]}
            del entry["litellm_params"]["engine"]
        async with GatewayHarness(model_list=entries) as harness:

            async def say(model: str, route: str, stream: bool) -> None:
                body = {**REQUESTS[route], "model": model, **({"stream": True} if stream else {})}
                async with harness.session.post(harness.url(f"/{route}"), json=body) as answer:
                    data = await answer.json()
                    assert answer.status == 400, (model, route, data)
                    assert data["error"]["message"]
                    wait = answer.headers.get("retry-after", "1")
                    assert wait.isdecimal()
                    assert 1 <= int(wait) <= LONGEST_RETRY_AFTER

            calls = [
                (entry["model_name"], route, stream)
                for entry in entries
                for route in REQUESTS
                if "count" not in route
                if ("native" in entry["model_name"]) <= (route in ("messages", "responses"))
                for stream in (False, True)
            ]
            for at in range(0, len(calls), 50):
                await asyncio.gather(*(say(*call) for call in calls[at : at + 50]))
            states = await harness.states()
            assert states == ["upstream_error"] * len(calls)
            assert harness.proxy.stats()["calls"] == {"upstream_error": len(calls)}
            assert harness.proxy.stats()["rejected"] == 0
