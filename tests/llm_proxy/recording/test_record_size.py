"""A record that is too large shrinks and is kept: no call is lost, whatever grows in its serialization."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.llm_proxy.calls import GatewayCall
from agentlightning.llm_proxy.dialects.token_fields import CallTokens
from agentlightning.llm_proxy.recording.spans import KEPT_BYTES, fitting, size_of, spans_of, surely_fit
from agentlightning.store.http.client import LightningStoreClient
from agentlightning.store.http.server import LightningStoreServer
from agentlightning.store.memory import InMemoryLightningStore
from tests.llm_proxy.harness import GatewayHarness
from tests.stubs.faulty_engine import CHUNKED, FaultyEngine, Request, chunked, whole
from tests.stubs.model_server import ModelServer

Json = dict[str, Any]
MILLION = 1_000_000
GROWING = {
    "control characters": "\x01" * (5 * MILLION),
    "umlauts": "ü" * (5 * MILLION),
    "emoji": "\U0001f642" * (2 * MILLION),
    "quotes": '"\\' * (5 * MILLION),
    "halves of pairs": "\ud83d" * (4 * MILLION),
    "just text": "x" * (28 * MILLION),
}


@pytest.fixture
async def store() -> AsyncGenerator[LightningStoreClient, None]:
    """A store behind HTTP, whose server takes bodies of at most 32 MiB."""
    server = LightningStoreServer(InMemoryLightningStore(), port=0)
    await server.start()
    client = LightningStoreClient(server.endpoint)
    yield client
    await client.close()
    await server.stop()


@pytest.mark.heavy
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("case", GROWING)
async def test_a_call_whose_texts_grow_when_written_is_recorded_whole_or_by_hash(
    store: LightningStoreClient, case: str, streamed: bool
) -> None:
    text = GROWING[case]
    answer = text if case in ("umlauts", "emoji", "quotes") else "short"
    async with GatewayHarness(ModelServer(lambda _: answer), store=store) as harness:
        request_body = {"model": "policy", "messages": [{"role": "user", "content": text}], "stream": streamed}
        body = json.dumps(request_body, ensure_ascii=case != "umlauts").encode()
        async with harness.session.post(harness.url(), data=io.BytesIO(body)) as reply:
            assert reply.status == 200, await reply.text()
            assert (b"[DONE]" in await reply.read()) == streamed
        assert harness.proxy.stats()["lost"] == 0
        assert await harness.states() == ["ok"]
        prompt = str((await harness.spans())[0].attributes["gen_ai.prompt.0.content"])
        written = text.encode("utf-8", "replace")
        sha = hashlib.sha256(written).hexdigest()
        assert prompt in (written.decode(), f"[not kept: {len(written)} bytes, sha256 {sha}]")


TOKENS = 500_000


def many_tokens(tokens: int) -> Json:
    entries = [{"token": "x", "logprob": -0.1234567890123}] * tokens
    return {"index": 0, "token_ids": [123_456] * tokens, "logprobs": {"content": entries}}


async def answers_in_many_tokens(request: Request) -> None:
    head = {"id": "c", "model": "m", "prompt_token_ids": [1, 2]}
    if not request.streamed:
        choice = {**many_tokens(TOKENS), "message": {"content": "x"}, "finish_reason": "stop"}
        await request.send(whole(200, json.dumps({**head, "choices": [choice]}).encode()))
        return
    frame = json.dumps({**head, "choices": [{**many_tokens(TOKENS // 10), "delta": {"content": "x"}}]}).encode()
    last = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    await request.send(CHUNKED + chunked([*[b"data: " + frame + b"\n\n"] * 10, last, b"data: [DONE]\n\n"]))


@pytest.mark.heavy
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_of_half_a_million_tokens_keeps_as_many_as_fit(
    store: LightningStoreClient, streamed: bool
) -> None:
    with FaultyEngine({"policy": answers_in_many_tokens}) as engine:
        async with GatewayHarness(model_list=engine.entries, store=store) as harness:
            body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "stream": streamed}
            async with harness.session.post(harness.url(), json=body) as reply:
                assert reply.status == 200, await reply.text()
                await reply.read()
            assert harness.proxy.stats()["lost"] == 0
            [call] = await harness.raw()
            assert call["state"] == "ok"
            assert len(call["completion_token_ids"]) == TOKENS


async def test_a_store_that_takes_less_gets_a_smaller_record() -> None:
    from agentlightning.errors import TooLargeError

    class SmallStore(InMemoryLightningStore):
        async def add_many_spans(self, spans: Any) -> Any:
            if sum(len(span.model_dump_json()) for span in spans) > 20_000:
                raise TooLargeError("too large")
            return await super().add_many_spans(spans)

    async with GatewayHarness(store=SmallStore()) as harness:
        assert (await harness.ask("x" * 50_000))[0] == 200
        assert harness.proxy.stats()["lost"] == 0
        assert await harness.states() == ["ok"]
        assert "sha256" in str((await harness.spans())[0].attributes["gen_ai.prompt.0.content"])


def call_of(tokens: int, messages: int = 1) -> GatewayCall:
    call = GatewayCall("ro-1", "at-1", 1)
    call.request = {
        "model": "m",
        "messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "a"}]}] * messages,
    }
    ids = [123_456] * tokens
    call.answered({"id": "c", "choices": [{"index": 0, "token_ids": ids}]}, CallTokens([1], ids, [-0.5] * tokens))
    return call


def bytes_of(call: GatewayCall, kept_bytes: int) -> int:
    return sum(len(json.dumps(span.attributes, separators=(",", ":"))) for span in spans_of(call, kept_bytes))


@pytest.mark.parametrize("messages", [1, 300])
@pytest.mark.parametrize("tokens", [0, 10, 1000, 20_000])
@pytest.mark.parametrize("kept_bytes", [4096, 20_000, 200_000, KEPT_BYTES])
def test_the_bound_holds_and_tokens_are_kept_together_or_not_at_all(
    tokens: int, messages: int, kept_bytes: int
) -> None:
    call = call_of(tokens, messages)
    assert bytes_of(call, kept_bytes) <= kept_bytes + 1000
    request, raw = spans_of(call, kept_bytes)
    keys = {key.removeprefix("agentlightning.call.") for key in raw.attributes}
    if raw.attributes["agentlightning.call.state"] == "ok":
        assert {"prompt_token_ids", "completion_token_ids"} <= keys
    else:
        assert raw.attributes["agentlightning.call.state"] == "no_tokens"
        assert not {"prompt_token_ids", "completion_token_ids", "completion_logprobs"} & keys
        assert raw.attributes["agentlightning.call.completion_tokens"] == tokens
    whole = bytes_of(call, 10**9) <= kept_bytes
    assert ("sha256" in json.dumps([request.attributes, raw.attributes])) == (not whole)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=400), st.integers(), st.lists(st.floats(-9, 0), max_size=99)), max_size=40))
def test_parts_fit_whatever_they_are(values: list[Any]) -> None:
    attributes = {f"gen_ai.prompt.{n}": value for n, value in enumerate(values)}
    fit = fitting(attributes, 3000)
    assert sum(size_of(key, value) for key, value in fit.items()) <= 3000 + 500
    if len(json.dumps(attributes)) <= 2000:
        assert fit == attributes


async def test_a_call_that_cannot_be_written_down_leaves_a_bare_record(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentlightning.llm_proxy.recording import recorder

    def breaks(call: GatewayCall, kept_bytes: int) -> Any:
        raise KeyError("a fault of ours")

    monkeypatch.setattr(recorder, "spans_of", breaks)
    async with GatewayHarness() as harness:
        answers = await asyncio.gather(*(harness.ask() for _ in range(2)))
        assert [status for status, _ in answers] == [500, 500]
        assert await harness.states() == ["upstream_error"] * 2
        assert harness.proxy.stats()["lost"] == 0


VALUES = (
    st.text()
    | st.booleans()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.integers(-(2**63), 2**63 - 1)
    | st.lists(st.integers(0, 2**31 - 1))
    | st.lists(st.floats(allow_nan=False, allow_infinity=False))
)


@given(st.dictionaries(st.text("abc.", min_size=1), VALUES, min_size=1, max_size=8))
def test_what_is_measured_as_too_large_never_surely_fits(attributes: dict[str, Any]) -> None:
    size = sum(size_of(key, value) for key, value in attributes.items())
    assert not surely_fit((attributes,), size - 1)
    assert surely_fit(({"a": "b" * 1000, "c": [1, 2, 3], "d": 0.5},), KEPT_BYTES)
