"""Connections that would never end: each has an end, in time or in size, on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

import psutil
import pytest

from agentlightning.utils.http.auth import Receive, Scope, Send
from agentlightning.utils.http.dispatch import Endpoint, JsonDispatch, Request
from agentlightning.utils.http.protocol import HttpBounds, send_whole
from agentlightning.utils.server_launcher import PythonServerLauncher, PythonServerLauncherArgs
from tests.stubs.raw_http import Answer, exchange, read_answer, request

BOUNDS = HttpBounds(arrival_seconds=0.3, unread_seconds=0.3, connections=8)
LARGE = 16 * 1024 * 1024


class App:
    """`/large` answers with 16 MiB, `/stream` without end, `/late` reads its body late, `/wait` answers when its client
    leaves; the rest echoes its body."""

    def __init__(self) -> None:
        self.begun = 0
        self.left = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun += 1
        if scope["path"] == "/late":
            await asyncio.sleep(1.0)
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.set()
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        if scope["path"] == "/wait":
            assert (await receive())["type"] == "http.disconnect"
            self.left.set()
            return
        if scope["path"] == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                await asyncio.sleep(0)  # uvicorn's send does not wait for who is gone
        body = b"x" * LARGE if scope["path"] == "/large" else body
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def server() -> AsyncIterator[PythonServerLauncher]:
    args = PythonServerLauncherArgs(launch_mode="thread", bounds=BOUNDS, timeout_keep_alive=0.3, shutdown_timeout=0.2)
    made = PythonServerLauncher(App(), args, headers=[("x-mark", "1")])
    await made.start()
    yield made
    await made.stop()


async def rest_of(port: int, *pieces: bytes, seconds: float = 10.0) -> bytes:
    """Send bytes and return everything that comes until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
        return await asyncio.wait_for(reader.read(), seconds)
    finally:
        writer.close()


def chunked(*chunks: bytes) -> bytes:
    return b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(chunks)


def assert_is_refusal(answer: Answer, status: int) -> None:
    assert answer.status == status
    assert answer.headers["connection"] == "close"
    assert answer.headers["x-mark"] == "1"
    assert set(answer.json) == {"detail", "error_type"}


@pytest.mark.parametrize(
    "begun",
    [
        pytest.param(b"GET / HTT", id="request line"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: a\r\nX: y", id="header"),
        pytest.param(request("POST", "/", b"x", content_length="9"), id="body"),
        pytest.param(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", id="chunked body"),
    ],
)
async def test_a_request_that_does_not_arrive_is_answered_408_and_cut(
    server: PythonServerLauncher, begun: bytes
) -> None:
    assert_is_refusal(await exchange(server.port, begun), 408)


async def test_a_request_that_comes_drop_by_drop_is_cut_all_the_same(server: PythonServerLauncher) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    answer = asyncio.create_task(read_answer(reader))
    writer.write(request("POST", "/", content_length="1000"))
    while not answer.done():
        writer.write(b"x")
        await asyncio.wait([answer], timeout=0.05)
    assert_is_refusal(await answer, 408)
    writer.close()


@pytest.mark.parametrize("begun", [b"", b"\r\n", request("GET", "/"), request("GET", "/") + b"\r\n"])
async def test_an_idle_connection_is_closed(server: PythonServerLauncher, begun: bytes) -> None:
    await rest_of(server.port, begun)


async def test_who_keeps_an_idle_connection_open_with_blank_lines_is_closed_too(server: PythonServerLauncher) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    end = asyncio.create_task(reader.read())
    while not end.done():
        writer.write(b"\r\n")
        await asyncio.wait([end], timeout=0.1)
    writer.close()


@pytest.mark.parametrize("path", ["/large", "/stream"])
async def test_a_client_that_does_not_read_its_answer_is_cut(
    server: PythonServerLauncher, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1)
    writer.write(request("GET", path))
    began = time.monotonic()
    while "response not read" not in caplog.text:
        assert time.monotonic() - began < 10
        await asyncio.sleep(0.02)  # a log line has no event
    writer.close()
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


async def test_a_client_that_reads_slowly_gets_all_of_its_answer(server: PythonServerLauncher) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request("GET", "/large"))
    await reader.readuntil(b"\r\n\r\n")
    got = 0
    while got < LARGE:
        got += len(await reader.read(1024 * 1024))
        await asyncio.sleep(0.02)  # longer in all than the bound on not reading
    assert got == LARGE
    writer.close()


async def test_a_request_is_not_late_while_it_is_the_server_that_does_not_read(server: PythonServerLauncher) -> None:
    body = b"x" * (4 * 1024 * 1024)
    assert (await exchange(server.port, request("POST", "/late", body))).body == body


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        pytest.param([request("GET", "/" + "x" * 40_000)], 414, id="long URL"),
        pytest.param([request("GET", "/" + "x" * 1_000_000)], 414, id="very long URL"),
        pytest.param([b"GET /" + b"x" * 30_000, b"x" * 30_000, b"x" * 30_000], 414, id="URL in pieces"),
        pytest.param([request("GET", "/", x="y" * 70_000)], 431, id="long header"),
        pytest.param([request("GET", "/", x="y" * 3_000_000)], 431, id="very long header"),
        pytest.param([request("GET", "/", **{f"h{i}": "y" * 100 for i in range(1000)})], 431, id="many headers"),
        pytest.param([b"GET / HTTP/1.1\r\n", *([b"x: " + b"y" * 9000 + b"\r\n"] * 9)], 431, id="headers in pieces"),
        pytest.param([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"], 400, id="TLS"),
        pytest.param([b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"], 400, id="two lengths"),
        pytest.param([b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"], 400, id="negative length"),
        pytest.param([b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"], 400, id="bad chunk"),
        pytest.param([chunked(b"0\r\na: b\r\n\r\n")], 400, id="trailer"),
        pytest.param([chunked(b"2\r\nabc\r\n0\r\n\r\n")], 400, id="chunk longer than it says"),
        pytest.param([request("POST", "/", b"abc\x00\xff", content_length="3")], 400, id="body longer than it says"),
        pytest.param([request("POST", "/", b"x", content_length="1, 2")], 400, id="a list of lengths"),
        pytest.param([chunked(b"1;x=" + b"y" * 140_000)], 400, id="chunk extension"),
        pytest.param([chunked(b"1\r\nx\r\n" * 60_000)], 400, id="small chunks"),
        pytest.param([b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n"], 501, id="encoding"),
        pytest.param([b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"], 400, id="HTTP/1.0"),
        pytest.param([b"POST / HTTP/1.1\r\n" + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n"], 400, id="twice"),
        pytest.param([b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 257 + b"\r\n"], 431, id="small headers"),
        pytest.param([b"GET /\xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n"], 400, id="bytes in the URL"),
        pytest.param([b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n"], 400, id="CONNECT"),
    ],
)
async def test_a_request_beyond_the_protocol_or_its_sizes_gets_a_refusal_in_our_form(
    server: PythonServerLauncher, pieces: list[bytes], status: int
) -> None:
    assert_is_refusal(await exchange(server.port, *pieces), status)


async def test_requests_sent_ahead_of_a_slow_one_are_few_and_the_slow_one_is_told_when_the_client_is_cut() -> None:
    app = App()
    server = PythonServerLauncher(app, PythonServerLauncherArgs(bounds=HttpBounds()))
    await server.start()
    before = psutil.Process().memory_info().rss
    ahead = b"GET / HTTP/1.1\r\n\r\n" * 300_000
    with contextlib.suppress(ConnectionError):
        await rest_of(server.port, request("GET", "/wait"), ahead)
    assert app.begun == 1
    await asyncio.wait_for(app.left.wait(), 10)
    assert psutil.Process().memory_info().rss - before < 100 * 2**20
    await server.stop()


async def test_a_few_requests_sent_ahead_are_answered_in_order(server: PythonServerLauncher) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    bodies = [str(number).encode() for number in range(HttpBounds().pipelined)]
    writer.write(b"".join(request("POST", "/", body) for body in bodies))
    assert [(await read_answer(reader)).body for _ in bodies] == bodies
    writer.close()


async def test_the_head_of_a_request_is_not_charged_for_the_body_before_it(server: PythonServerLauncher) -> None:
    body = b"x" * 1_000_000
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request("POST", "/", body) + request("POST", "/", b"y", x="z" * 60_000)[:50_000])
    assert (await read_answer(reader)).body == body
    writer.write(request("POST", "/", b"y", x="z" * 60_000)[50_000:])
    assert (await read_answer(reader)).body == b"y"
    writer.close()


async def test_a_refused_request_that_never_stops_coming_is_cut(server: PythonServerLauncher) -> None:
    async def send_without_end() -> None:
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()

    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(send_without_end(), 20)
    writer.close()


async def test_an_upgrade_is_ignored_and_the_request_answered(server: PythonServerLauncher) -> None:
    request_bytes = request("GET", "/", connection="Upgrade", upgrade="websocket")
    assert (await exchange(server.port, request_bytes)).status == 200


async def test_one_connection_too_many_is_told_to_come_back_and_may_when_another_has_left(
    server: PythonServerLauncher,
) -> None:
    open_ones = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(BOUNDS.connections)]
    for _, writer in open_ones:
        writer.write(request("GET", "/wait"))
    await until_begun(server, len(open_ones))
    refused = await exchange(server.port, request("GET", "/"))
    assert_is_refusal(refused, 503)
    assert int(refused.headers["retry-after"]) >= 1
    assert (await exchange(server.port, request("GET", "/health"))).status == 200
    for _, writer in open_ones:
        writer.close()
    while (await exchange(server.port, request("GET", "/"))).status != 200:  # noqa: ASYNC110 -- the server's event
        await asyncio.sleep(0.01)


async def until_begun(server: PythonServerLauncher, count: int) -> None:
    app = server.app
    assert isinstance(app, App)
    while app.begun < count:  # noqa: ASYNC110 -- the server's event
        await asyncio.sleep(0.01)


BEGUN = {
    "nothing": b"",
    "half a head": b"GET / HTTP/1.1\r\nHost: a\r\n",
    "an answered request": request("GET", "/"),
    "a blank line": b"\r\n",
}


@pytest.mark.parametrize("begun", BEGUN)
async def test_connections_that_ask_for_nothing_lock_nobody_out(begun: str) -> None:
    app = App()
    server = PythonServerLauncher(app, PythonServerLauncherArgs(bounds=HttpBounds(connections=32)))
    await server.start()
    _, working = await asyncio.open_connection("127.0.0.1", server.port)
    working.write(request("GET", "/wait"))
    await until_begun(server, 1)
    silent: list[asyncio.StreamWriter] = []
    for _ in range(200):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(BEGUN[begun])
        silent.append(writer)
    for path in ("/", "/health", "/"):
        assert (await exchange(server.port, request("GET", path))).status == 200
    assert not app.left.is_set()  # who waits for an answer keeps the connection
    for writer in (working, *silent):
        writer.transport.abort()
    await server.stop()


async def test_a_stop_does_not_wait_for_who_does_not_read_and_logs_no_error(
    server: PythonServerLauncher, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request("GET", "/stream"))
    await reader.readuntil(b"\r\n\r\n")
    await asyncio.wait_for(server.stop(), 5)
    writer.close()
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


# --- answers in one write --------------------------------------------------------------------------------------------


async def in_two_messages(scope: Scope, receive: Receive, send: Send) -> None:
    """The same answer as ASGI has it, which uvicorn writes."""

    async def other(message: object) -> None:
        await send(message)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType] -- passed through

    await send_whole(other, 200, b"application/json", b'"two"')


@pytest.fixture
async def whole() -> AsyncIterator[int]:
    """Return the port of a server that echoes at `/echo`; at `/hello` and elsewhere it says "two"."""

    async def echoed(request: Request, arguments: dict[str, bytes]) -> bytes:
        return b'"%s"' % arguments["body"]

    endpoints = [
        Endpoint("POST", "/echo", lambda request: {"body": request.body}, echoed, bytes),
        Endpoint("GET", "/hello", lambda request: {"body": b"two"}, echoed, bytes),
    ]
    server = PythonServerLauncher(JsonDispatch(endpoints, in_two_messages), PythonServerLauncherArgs())
    await server.start()
    yield server.port
    await server.stop()


async def test_an_answer_in_one_write_is_the_one_that_uvicorn_writes(whole: int) -> None:
    ours, of_uvicorn = [await exchange(whole, request("GET", path)) for path in ("/hello", "/other")]
    assert ours.body == of_uvicorn.body == b'"two"'
    assert {**ours.headers, "date": ""} == {**of_uvicorn.headers, "date": ""}
    head = await exchange(whole, request("HEAD", "/hello"), to_head=True)
    assert (head.status, head.headers["content-length"]) == (200, "5")
    last = await rest_of(whole, b"GET /hello HTTP/1.0\r\nhost: 127.0.0.1\r\n\r\n")
    assert b"connection: close\r\n" in last
    assert last.endswith(b'\r\n\r\n"two"')


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_answers_come_in_order_however_the_requests_are_cut(whole: int, size: int) -> None:
    in_chunks = chunked(b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n").replace(b"POST /", b"POST /echo", 1)
    raw = in_chunks.replace(b"Host: a", b"Host: 127.0.0.1") + b"".join(
        request("POST", "/echo", b"%d" % n) for n in range(5)
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", whole)
    for start in range(0, len(raw), size):
        writer.write(raw[start : start + size])
        await asyncio.sleep(0)
    bodies = [(await asyncio.wait_for(read_answer(reader), 10)).body for _ in range(6)]
    assert bodies == [b'"abcde"', *(b'"%d"' % number for number in range(5))]
    writer.close()


async def test_a_client_that_leaves_before_its_answer_costs_nobody_else(whole: int) -> None:
    for raw in (request("POST", "/echo", b"abc", content_length="9"), chunked(b"3\r\nab"), request("GET", "/hello")):
        _, writer = await asyncio.open_connection("127.0.0.1", whole)
        writer.write(raw)
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    assert (await exchange(whole, request("POST", "/echo", b"hello"))).body == b'"hello"'
