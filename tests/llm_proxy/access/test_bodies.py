"""Compressed requests: unpacked within the bound of a request, for every encoder and content."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentlightning.llm_proxy.access.limits import GatewayLimits
from agentlightning.utils.http.byte_budget import PROCESS
from tests.llm_proxy.harness import GatewayHarness

BODY = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hi " * 1000}]}).encode()


def bare_deflate(raw: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(raw) + packer.flush()


PACKED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "GZIP": ("GZIP", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "deflate without a head": ("deflate", bare_deflate),
}


def packed(case: str, raw: bytes) -> tuple[str, bytes]:
    encoding, pack = PACKED[case]
    return encoding, pack(raw)


@pytest.mark.parametrize("case", PACKED)
async def test_a_compressed_request_is_the_request(harness: GatewayHarness, case: str) -> None:
    encoding, raw = packed(case, BODY)
    for tail in ("/chat/completions", "/messages/count_tokens"):
        assert (await harness.post(harness.url(tail), raw, **{"Content-Encoding": encoding}))[0] == 200
    assert harness.model.calls[0].request["messages"] == json.loads(BODY)["messages"]
    assert "content-encoding" not in harness.model.calls[0].headers
    assert PROCESS.held == 0


@pytest.mark.parametrize("case", PACKED)
async def test_a_bomb_stops_at_the_bound(case: str) -> None:
    encoding, raw = packed(case, b" " * 50_000_000)
    async with GatewayHarness(limits=GatewayLimits(body_bytes=1_000_000)) as harness:
        status, reply = await harness.post("/chat/completions", raw, **{"Content-Encoding": encoding})
        assert (status, reply["error"]["code"]) == (413, "body_too_large")
        assert await harness.states() == ["refused"]
    assert PROCESS.held == 0


@pytest.mark.parametrize("case", PACKED)
async def test_what_cannot_be_unpacked_is_refused(harness: GatewayHarness, case: str) -> None:
    encoding, raw = packed(case, BODY)
    for broken in (raw[:-5], raw[: len(raw) // 2], b"", b"no such thing", BODY, raw + b"more"):
        status, reply = await harness.post("/chat/completions", broken, **{"Content-Encoding": encoding})
        assert (status, reply["error"]["code"]) == (400, "invalid_encoding"), broken[:20]
    assert harness.model.calls == []


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "x" * 500])
async def test_an_encoding_that_is_not_known_is_refused_by_its_name(harness: GatewayHarness, encoding: str) -> None:
    status, reply = await harness.post("/chat/completions", BODY, **{"Content-Encoding": encoding})
    assert (status, reply["error"]["code"]) == (415, "unsupported_encoding")
    assert "gzip" in reply["error"]["message"]
    identity = {"Content-Encoding": "identity"}
    assert (await harness.post("/chat/completions", BODY, **identity))[0] == 200


def test_any_bytes_are_a_request_or_a_refusal() -> None:
    async def run() -> None:
        async with GatewayHarness() as harness:
            attempt, loop = await harness.attempt(), asyncio.get_running_loop()

            @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
            @given(
                st.binary(max_size=60) | st.binary(max_size=20).map(gzip.compress), st.sampled_from(["gzip", "deflate"])
            )
            def each(raw: bytes, encoding: str) -> None:
                request = harness.post(harness.url(of=attempt), raw, **{"Content-Encoding": encoding})
                status, reply = asyncio.run_coroutine_threadsafe(request, loop).result()
                assert (status, bool(reply["error"]["message"])) == (400, True)

            await asyncio.to_thread(each)

    asyncio.run(run())
