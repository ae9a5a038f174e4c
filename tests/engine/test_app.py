"""The engine's HTTP side: a client that goes away ends its completions."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
import urllib.parse

import pytest

from agentlightning.engine.engine import InferenceEngine
from tests.engine.byte_policy import byte_policy
from tests.engine.clients import HI, ask


def test_a_client_that_goes_away_ends_its_completions() -> None:
    policy = byte_policy(context=100_000)
    engine = InferenceEngine(policy, max_batch=4, max_new_tokens=90_000)
    engine.start()
    try:
        port = int(engine.base_url.split(":")[2].split("/")[0])
        end = str(policy.tokenizer.eos_token_id)
        body = {"model": "policy", "messages": HI, "n": 4, "max_tokens": 90_000, "logit_bias": {end: -100}}
        raw = json.dumps(body).encode()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(raw)}\r\n\r\n"
            connection.sendall(head.encode() + raw)
            _until(engine, 4)
        _until(engine, 0)  # long before the 90,000 tokens are there
        assert not engine.record
        assert len(ask(engine, max_tokens=3)["choices"]) == 1
    finally:
        engine.stop()


@pytest.mark.parametrize(
    "field",
    ['"tools": [{"type": "function", "function": {"name": "f", "parameters": %s}}]', '"chat_template_kwargs": %s'],
)
@pytest.mark.parametrize("depth", [800, 100_000])
def test_a_body_nested_too_deeply_is_no_fault_of_the_engine(
    byte_engine: InferenceEngine, field: str, depth: int
) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    body = f'{{"model": "policy", "max_tokens": 1, "messages": {json.dumps(HI)}, {field % deep}}}'
    address = urllib.parse.urlsplit(byte_engine.base_url)
    connection = http.client.HTTPConnection(address.netloc, timeout=60)
    connection.request("POST", "/v1/chat/completions", body)
    with contextlib.closing(connection), connection.getresponse() as answer:
        assert answer.status in (200, 400)  # what is too deep differs between versions of Python


def _until(engine: InferenceEngine, in_flight: int) -> None:
    end = time.monotonic() + 30
    while engine._loop.load()["in_flight"] != in_flight:
        assert time.monotonic() < end, f"still {engine._loop.load()}"
        time.sleep(0.01)
