"""Answers that are written in one piece, on a real socket, to requests that come whole and to those that do not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from agentlightning.utils.http.auth import Receive, Scope, Send
from agentlightning.utils.http.dispatch import Endpoint, JsonDispatch, Request
from agentlightning.utils.http.messages import HttpBounds
from agentlightning.utils.http.whole_answer import send_whole
from agentlightning.utils.server_launcher import PythonServerLauncher, PythonServerLauncherArgs
from tests.stubs.raw_http import exchange, read_answer, request

MOST = 1000
CHUNKED = b"POST /echo HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n"


async def in_two_messages(scope: Scope, receive: Receive, send: Send) -> None:
    """The same answer as ASGI has it, which uvicorn writes."""

    async def other(message: object) -> None:
        await send(message)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType] -- passed through

    await send_whole(other, 200, b"application/json", b'"two"')


async def echoed(request: Request, arguments: dict[str, bytes]) -> bytes:
    return arguments["body"]


@pytest.fixture
async def port() -> AsyncIterator[int]:
    echo = Endpoint("POST", "/echo", lambda r: {"body": r.body}, echoed, lambda body: b'"%s"' % body)
    hello = Endpoint("GET", "/hello", lambda r: {"body": b"two"}, echoed, lambda body: b'"%s"' % body)
    app = JsonDispatch([echo, hello], in_two_messages, max_body_bytes=MOST)
    bounds = HttpBounds(arrival_seconds=0.5)
    server = PythonServerLauncher(app, PythonServerLauncherArgs(launch_mode="thread", bounds=bounds))
    await server.start()
    yield server.port
    await server.stop()


async def assert_is_served(port: int) -> None:
    answer = await exchange(port, request("POST", "/echo", b"hello"))
    assert (answer.status, answer.body) == (200, b'"hello"')


async def test_it_is_the_answer_that_uvicorn_writes(port: int) -> None:
    ours, of_uvicorn = [await exchange(port, request("GET", path)) for path in ("/hello", "/other")]
    assert ours.body == of_uvicorn.body == b'"two"'
    assert {**ours.headers, "date": ""} == {**of_uvicorn.headers, "date": ""}


async def test_a_connection_is_kept_and_each_request_gets_its_own_answer(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for number in range(3):
        writer.write(request("POST", "/echo", b"%d" % number))
        assert (await read_answer(reader)).body == b'"%d"' % number
    writer.write(b"".join(request("POST", "/echo", b"%d" % number) for number in range(5)))  # ahead of their answers
    assert [(await read_answer(reader)).body for _ in range(5)] == [b'"%d"' % number for number in range(5)]
    writer.close()


async def test_head_has_no_body_and_http_1_0_ends_the_connection(port: int) -> None:
    answer = await exchange(port, request("HEAD", "/hello"), to_head=True)
    assert (answer.status, answer.headers["content-length"]) == (200, "5")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /hello HTTP/1.0\r\nhost: 127.0.0.1\r\n\r\n")
    whole = await asyncio.wait_for(reader.read(), 10)  # to the end of the connection
    assert b"connection: close\r\n" in whole
    assert whole.endswith(b'\r\n\r\n"two"')
    writer.close()


@pytest.mark.parametrize("size", [1, 7, 64])
async def test_a_body_in_chunks_is_answered_once_however_it_is_cut(port: int, size: int) -> None:
    raw = CHUNKED + b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for start in range(0, len(raw), size):
        writer.write(raw[start : start + size])
        await asyncio.sleep(0)
    answer = await asyncio.wait_for(read_answer(reader), 10)
    assert (answer.status, answer.body) == (200, b'"abcde"')
    writer.write(request("GET", "/hello"))
    assert (await read_answer(reader)).body == b'"two"'
    writer.close()


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        pytest.param(request("POST", "/echo", b"x" * (MOST + 1)), 413, id="too long"),
        pytest.param(request("POST", "/echo", b"x", content_length=str(MOST + 1)), 413, id="said to be too long"),
        pytest.param(CHUNKED + b"%x\r\n%s\r\n0\r\n\r\n" % (MOST + 1, b"x" * (MOST + 1)), 413, id="too long in chunks"),
        pytest.param(CHUNKED + b"zz\r\nabc\r\n0\r\n\r\n", 400, id="no length of a chunk"),
        pytest.param(CHUNKED + b"2\r\nabc\r\n0\r\n\r\n", 400, id="chunk longer than it says"),
        pytest.param(request("POST", "/echo", b"x", content_length="-1"), 400, id="negative length"),
        pytest.param(request("POST", "/echo", b"x", content_length="1, 2"), 400, id="two lengths"),
        pytest.param(request("POST", "/echo", b"abc", content_length="9"), 408, id="shorter than it says"),
        pytest.param(request("POST", "/echo", b"abc\x00\xff", content_length="3"), 400, id="longer than it says"),
    ],
)
async def test_a_body_that_is_not_what_it_says_is_refused_and_the_next_client_is_served(
    port: int, raw: bytes, status: int
) -> None:
    answer = await exchange(port, raw)
    assert answer.status == status
    assert set(answer.json) == {"detail", "error_type"}
    await assert_is_served(port)


async def test_a_client_that_leaves_before_its_answer_costs_nobody_else(port: int) -> None:
    for raw in (request("POST", "/echo", b"abc", content_length="9"), CHUNKED + b"3\r\nab", request("GET", "/hello")):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(raw)
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    await assert_is_served(port)
