"""Refusals of the gateway, in OpenAI's error form, and those that the attempt can see in its spans."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentlightning.adapter.calls.calls import model_calls
from agentlightning.adapter.calls.refusals import refused_for_good
from agentlightning.llm_proxy import GatewayLimits
from agentlightning.llm_proxy.access import admission
from agentlightning.types import AttemptedRollout
from tests.llm_proxy.harness import HI, REQUESTS, GatewayHarness, Response, arrived, until


def error_of(answer: Response) -> dict[str, Any]:
    """Return the error of a refusal, after checking OpenAI's form."""
    error = answer[1]["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return error


# --- addresses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/chat/completions", "/", "/rollout/R", "/v1/rollout/R/attempt/A/x"]
)
async def test_a_url_without_an_attempt_is_404_that_shows_the_right_form(harness: GatewayHarness, path: str) -> None:
    answer = await harness.post(harness.proxy.server_launcher.endpoint + path, REQUESTS["chat/completions"])
    assert answer[0] == 404
    assert "/rollout/<rollout_id>/attempt/<attempt_id>" in error_of(answer)["message"]
    assert harness.model.calls == []


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v2/chat/completions", "/v1/images/generations"])
async def test_what_is_not_served_for_an_attempt_is_404_that_lists_what_is(harness: GatewayHarness, tail: str) -> None:
    answer = await harness.post(harness.url(tail), REQUESTS["chat/completions"])
    assert answer[0] == 404
    message = error_of(answer)["message"]
    assert all(served in message for served in ("POST chat/completions", "POST messages", "GET models"))


@pytest.mark.parametrize(
    "tail",
    [
        "/v1beta/models/policy:generateContent",
        "/v1/v1beta/models/policy%3AstreamGenerateContent?alt=sse",
        "/v1/models/policy:countTokens",
        "/v1beta1/projects/p/locations/l/publishers/google/models/policy:generateContent",
    ],
)
async def test_geminis_api_is_refused_with_what_to_use_instead(harness: GatewayHarness, tail: str) -> None:
    answer = await harness.post(harness.url(tail), {"contents": []})
    assert answer[0] == 404
    error = error_of(answer)
    assert error["code"] == "unsupported_api"
    assert "is a route of Gemini's API, which this gateway does not serve. Configure the agent" in error["message"]


async def test_a_models_name_may_have_a_colon(harness: GatewayHarness) -> None:
    harness.proxy.update_model_list([harness.model.entry("qwen:7b")])
    async with harness.session.get(harness.url("/v1/models/qwen:7b")) as reply:
        assert (reply.status, (await reply.json())["id"]) == (200, "qwen:7b")


@pytest.mark.parametrize("rollout_id", ["a%2Fb", "..", "%2e%2e", "a%20b", "r%C3%B6", "a.b", "%00", "%", "x" * 129])
async def test_an_id_outside_the_grammar_is_404(harness: GatewayHarness, rollout_id: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", harness.proxy.server_launcher.port)
    path = f"/rollout/{rollout_id}/attempt/A/chat/completions"  # clients would tidy it up
    writer.write(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n".encode())
    assert b" 404 " in await reader.readline()
    writer.close()
    await writer.wait_closed()


async def test_the_wrong_method_is_405(harness: GatewayHarness) -> None:
    url = harness.url()
    async with harness.session.get(url) as reply:
        assert reply.status == 405
        assert "POST" in (await reply.json())["error"]["message"]


async def test_health_is_open_and_asks_no_model(harness: GatewayHarness) -> None:
    async with harness.session.get(harness.proxy.server_launcher.endpoint + "/health") as reply:
        assert reply.status == 200
    assert harness.model.calls == []


# --- attempts ----------------------------------------------------------------------------------------------------


async def test_an_unknown_rollout_or_attempt_is_404_before_any_inference(harness: GatewayHarness) -> None:
    attempt = await harness.attempt()
    right = harness.url(of=attempt)
    for wrong, word in (
        (right.replace(attempt.rollout_id, "ro-none"), "ro-none"),
        (right.replace(attempt.attempt.attempt_id, "at-none"), "at-none"),
    ):
        answer = await harness.post(wrong, REQUESTS["chat/completions"])
        assert answer[0] == 404
        assert word in error_of(answer)["message"]
    assert harness.model.calls == []
    assert harness.proxy.stats()["rejected"] == 2


@pytest.mark.parametrize("status", ["failed", "succeeded"])
async def test_an_attempt_that_has_ended_is_403_with_the_reason(harness: GatewayHarness, status: Any) -> None:
    attempt = await harness.attempt()
    await harness.store.update_attempt(attempt.rollout_id, attempt.attempt.attempt_id, status=status)
    answer = await harness.ask(of=attempt)
    assert answer[0] == 403
    assert f"it has ended ({status})" in error_of(answer)["message"]
    assert harness.model.calls == []


async def test_the_end_of_an_attempt_is_noticed_although_answers_of_the_store_are_remembered(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert admission.LOOKUP_SECONDS <= 1.0
    monkeypatch.setattr(admission, "LOOKUP_SECONDS", 0.05)
    attempt = await harness.attempt()
    assert (await harness.ask(of=attempt))[0] == 200
    await harness.store.update_rollout(attempt.rollout_id, status="cancelled")
    while (answer := await harness.ask(of=attempt))[0] == 200:
        pass
    assert answer[0] == 403
    assert "its rollout has ended (cancelled)" in error_of(answer)["message"]


async def test_an_attempt_whose_place_was_taken_is_refused(harness: GatewayHarness) -> None:
    first = await harness.attempt()
    second = await harness.store.start_attempt(first.rollout_id)
    assert (await harness.ask(of=first))[0] == 403
    assert (await harness.ask(of=second))[0] == 200


# --- requests ----------------------------------------------------------------------------------------------------

BAD_REQUESTS: dict[str, tuple[Any, int, str | None]] = {
    "not JSON": (b"{", 400, None),
    "not an object": ([1], 400, None),
    "endless": (b"[" * 100_000, 400, None),
    "not UTF-8": (b'{"model": "\xff"}', 400, None),
    "no model": ({"messages": HI}, 400, "model"),
    "model is a number": ({"model": 3, "messages": HI}, 400, "model"),
    "no messages": ({"model": "policy"}, 400, "messages"),
    "unknown model": ({"model": "gpt", "messages": HI}, 404, "model"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
async def test_a_bad_request_names_the_field_and_is_recorded_as_refused(harness: GatewayHarness, case: str) -> None:
    body, status, param = BAD_REQUESTS[case]
    answer = await harness.post("/chat/completions", body)
    assert answer[0] == status
    assert error_of(answer)["param"] == param
    [call] = await harness.raw()
    assert (call["state"], call["http_status"], call["upstream_tries"]) == ("refused", status, 0)
    assert harness.model.calls == []


# --- bounds ------------------------------------------------------------------------------------------------------


async def test_a_body_beyond_the_bound_is_413() -> None:
    async with GatewayHarness(limits=GatewayLimits(body_bytes=5000)) as harness:
        answer = await harness.ask("x" * 5000)
        assert answer[0] == 413
        assert "5000 bytes" in error_of(answer)["message"]
        assert (await harness.ask("short"))[0] == 200
        assert await harness.states() == ["refused", "ok"]


async def test_a_reply_beyond_the_bound_is_502() -> None:
    async with GatewayHarness(limits=GatewayLimits(body_bytes=1000)) as harness:
        harness.model.answer = lambda _: "y" * 1000
        assert (await harness.ask())[0] == 502
        assert await harness.states() == ["upstream_error"]


@pytest.mark.parametrize(
    "limits", [GatewayLimits(calls=2, waiting_calls=1), GatewayLimits(calls_per_attempt=2, waiting_calls=1)]
)
async def test_calls_beyond_the_bound_are_429_with_retry_after_and_recorded(limits: GatewayLimits) -> None:
    async with GatewayHarness(limits=limits) as harness:
        harness.model.hold()
        running = [asyncio.create_task(harness.ask()) for _ in range(2)]
        await harness.model.until(arrived(2))
        running.append(asyncio.create_task(harness.ask()))
        await until(lambda: harness.proxy.calls_in_hand() == 3)
        body = REQUESTS["chat/completions"]
        async with harness.session.post(harness.url(), json=body) as reply:
            assert reply.status == 429
            assert reply.headers["Retry-After"] == "1"
            error_of((reply.status, await reply.json()))
        harness.model.release()
        assert [status for status, _ in await asyncio.gather(*running)] == [200, 200, 200]
        assert sorted(await harness.states()) == ["ok", "ok", "ok", "refused"]
        assert (await harness.ask())[0] == 200  # the slots are free again


@pytest.mark.parametrize(
    ("route", "stream"),
    [
        (route, stream)
        for route in REQUESTS
        for stream in (False, True)
        if "count" not in route and not (stream and route == "embeddings")
    ],
)
async def test_a_call_waits_in_each_dialect_and_one_beyond_the_queue_is_made_up_for_by_its_retry(
    route: str, stream: bool
) -> None:
    limits = GatewayLimits(calls_per_attempt=1, waiting_calls=1)
    async with GatewayHarness(limits=limits) as harness:
        body = {**REQUESTS[route], **({"stream": True} if stream else {})}

        async def ask() -> int:
            async with harness.session.post(harness.url(f"/{route}"), json=body) as reply:
                await reply.read()
                return reply.status

        harness.model.hold()
        waiting = [asyncio.create_task(ask())]
        await harness.model.until(arrived(1))
        waiting.append(asyncio.create_task(ask()))
        await until(lambda: harness.proxy.calls_in_hand() == 2)
        assert await ask() == 429
        harness.model.release()
        assert await asyncio.gather(*waiting) == [200, 200]
        assert await ask() == 200
        assert "refused" in await harness.states()
        assert refused_for_good(model_calls(await harness.spans())) == []


async def test_an_attempt_that_fills_the_queue_gives_its_newest_places_to_others() -> None:
    async with GatewayHarness(limits=GatewayLimits(calls=1, waiting_calls=4)) as harness:
        greedy, others = await harness.attempt(), [await harness.attempt(), await harness.attempt()]
        harness.model.hold()
        running = asyncio.create_task(harness.ask("greedy 0", of=greedy))
        await harness.model.until(arrived(1))
        waiting: list[asyncio.Task[Response]] = []

        async def add(attempt: AttemptedRollout, words: str, in_hand: int) -> None:
            waiting.append(asyncio.create_task(harness.ask(words, of=attempt)))
            await until(lambda: harness.proxy.calls_in_hand() == in_hand)

        for number in range(1, 5):
            await add(greedy, f"greedy {number}", number + 1)
        for number, other in enumerate(others):
            await add(other, f"other {number}", 5)
            status, refusal = await waiting[3 - number]
            assert (status, refusal["error"]["code"]) == (429, "too_many_calls")
            assert "a call of another attempt replaced this one" in refusal["error"]["message"]
        assert (await harness.ask("greedy 5", of=greedy))[0] == 429  # it has its share
        harness.model.release()
        assert (await running)[0] == 200
        assert [status for status, _ in await asyncio.gather(*waiting)] == [200, 200, 429, 429, 200, 200]
        order = [call.request["messages"][-1]["content"] for call in harness.model.calls]
        assert order == ["greedy 0", "greedy 1", "other 0", "other 1", "greedy 2"]
        assert harness.proxy.calls_in_hand() == 0


async def test_a_free_place_goes_to_the_attempt_with_the_fewest_calls_in_hand() -> None:
    async with GatewayHarness(limits=GatewayLimits(calls=3)) as harness:
        greedy, other = await harness.attempt(), await harness.attempt()
        harness.model.hold()
        running = [asyncio.create_task(harness.ask(f"greedy {n}", of=greedy)) for n in range(3)]
        await harness.model.until(arrived(3))
        running += [asyncio.create_task(harness.ask("waits first", of=greedy))]
        await until(lambda: harness.proxy.calls_in_hand() == 4)
        running += [asyncio.create_task(harness.ask("waits second", of=other))]
        await until(lambda: harness.proxy.calls_in_hand() == 5)
        running[0].cancel()
        await harness.model.until(arrived(4))
        assert harness.model.calls[3].request["messages"][-1]["content"] == "waits second"
        harness.model.release()
        statuses = [status for status, _ in await asyncio.gather(*running[1:])]
        assert statuses == [200] * 4


async def test_a_client_that_leaves_while_it_waits_frees_its_place() -> None:
    async with GatewayHarness(limits=GatewayLimits(calls_per_attempt=1, waiting_calls=1)) as harness:
        harness.model.hold()
        first = asyncio.create_task(harness.ask())
        await harness.model.until(arrived(1))
        leaving = asyncio.create_task(harness.ask())
        await until(lambda: harness.proxy.calls_in_hand() == 2)
        leaving.cancel()
        await until(lambda: harness.proxy.calls_in_hand() == 1)
        last = asyncio.create_task(harness.ask())
        await until(lambda: harness.proxy.calls_in_hand() == 2)
        harness.model.release()
        assert (await first)[0] == (await last)[0] == 200
        assert len(harness.model.calls) == 2
        assert sorted(await harness.states()) == ["client_left", "ok", "ok"]


async def test_a_call_whose_attempt_ends_while_it_waits_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "LOOKUP_SECONDS", 0.0)
    async with GatewayHarness(limits=GatewayLimits(calls_per_attempt=1)) as harness:
        attempt = await harness.attempt()
        harness.model.hold()
        first = asyncio.create_task(harness.ask(of=attempt))
        await harness.model.until(arrived(1))
        second = asyncio.create_task(harness.ask(of=attempt))
        await until(lambda: harness.proxy.calls_in_hand() == 2)
        await harness.store.update_attempt(attempt.rollout_id, attempt.attempt.attempt_id, status="succeeded")
        harness.model.release()
        assert (await first)[0] == 200
        status, reply = await second
        assert (status, reply["error"]["code"]) == (403, "attempt_over")
        assert len(harness.model.calls) == 1


async def test_a_call_for_which_there_is_no_room_in_time_is_refused() -> None:
    async with GatewayHarness(limits=GatewayLimits(calls_per_attempt=1, call_seconds=0.3)) as harness:
        harness.model.hold()
        calls = [asyncio.create_task(harness.ask()) for _ in range(3)]
        assert {status for status, _ in await asyncio.gather(*calls)} <= {429, 504}
        harness.model.release()
        assert harness.proxy.calls_in_hand() == 0


async def test_one_attempt_at_its_bound_does_not_hold_up_another() -> None:
    async with GatewayHarness(limits=GatewayLimits(calls_per_attempt=1)) as harness:
        first, second = await harness.attempt(), await harness.attempt()
        harness.model.hold()
        running = asyncio.create_task(harness.ask(of=first))
        await harness.model.until(arrived(1))
        other = asyncio.create_task(harness.ask(of=second))
        await harness.model.until(arrived(2))
        harness.model.release()
        assert (await running)[0] == (await other)[0] == 200


def test_a_bound_that_is_not_positive_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"GatewayLimits\.calls must be positive; got 0"):
        GatewayLimits(calls=0)
