"""Limits of every server: it does not hold what a client sends without end, nor leave it unanswered."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

import agentlightning
from agentlightning.utils.http.byte_budget import PROCESS
from tests.stubs.every_server import EVERY_SERVER
from tests.stubs.raw_http import Answer, exchange, read_answer, request

pytestmark = pytest.mark.filterwarnings("ignore:.* uses the deprecated v0.1 protocol:DeprecationWarning")
MIB = 2**20
SENT = 48 * MIB
"""Bytes that an attack sends at most."""
TAKEN = 16 * MIB
"""Bytes that a server may have read when it has closed: some pieces, what it reads on so that its refusal is read, and
what lies in the buffers of both sockets."""
HELD = 100 * MIB
"""Bytes by which the process with both ends may grow. The weakest server took twenty times what was sent."""
Server = tuple[int, list[str]]


@pytest.fixture(params=EVERY_SERVER)
async def server(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Server]:
    for name in ("AGL_TOKEN", "AGL_ALLOWED_HOSTS"):
        monkeypatch.delenv(name, raising=False)
    async with EVERY_SERVER[request.param](tmp_path) as served:
        yield served


def test_nothing_of_ours_listens_but_through_the_server_that_has_the_bounds() -> None:
    root = Path(agentlightning.__file__).parent
    makes_a_server = re.compile(
        r"uvicorn\.(run|Server|Config)\b|start_server\(|(?<!socket\.)create_server\(|(?<!store\.)http\.server|HTTPServer"
    )
    files = {str(path.relative_to(root)) for path in root.rglob("*.py") if makes_a_server.search(path.read_text())}
    forwards_bytes = "litagent/command/sandbox.py"  # reads no request; its bounds are in its own test
    assert files == {"utils/http/uvicorn_server.py", forwards_bytes}
    launches = re.compile(r"\b(PythonServerLauncher|AsgiServer)\(")
    users = {str(path.relative_to(root)) for path in root.rglob("*.py") if launches.search(path.read_text())}
    assert users - {"utils/http/uvicorn_server.py", "utils/server_launcher.py"} == {
        "engine/chat_server.py",
        "cli/serving.py",
        "legacy/server.py",
        "llm_proxy/proxy.py",
        "store/http/server.py",
    }, "a further server belongs into EVERY_SERVER"


def rss() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


async def send_without_end(port: int, head: bytes, piece: bytes) -> tuple[int, bytes]:
    """Send until the server closes or everything is sent; return how much went out and what came back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = asyncio.create_task(reader.read())
    sent = 0
    try:
        writer.write(head)
        while sent < SENT:
            writer.write(piece)
            await asyncio.wait_for(writer.drain(), 20)
            sent += len(piece)
    except ConnectionError:
        pass
    try:
        return sent, await asyncio.wait_for(answer, 20)
    except ConnectionError:
        return sent, b""
    finally:
        answer.cancel()
        writer.transport.abort()


async def told(port: int, data: bytes) -> Answer:
    """Return the answer to a request of which not all may be read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        return await asyncio.wait_for(read_answer(reader), 20)
    finally:
        writer.transport.abort()
        await asyncio.sleep(0)  # its end is told to the loop


CHUNKED = "Host: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "small trailers": (CHUNKED + "0\r\n", b"a:\r\n" * 16_384),
    "one trailer": (CHUNKED + "0\r\na: ", b"x" * 65_536),
    "a trailer's name": (CHUNKED + "0\r\n", b"x" * 65_536),
    "a chunk extension": (CHUNKED + "1;a=", b"x" * 65_536),
    "a chunk extension's name": (CHUNKED + "1;", b"x" * 65_536),
    "extensions of small chunks": (CHUNKED, b"1;" + b"x" * 60_000 + b"\r\n \r\n"),
    "chunks of one byte": (CHUNKED, b"1\r\n \r\n" * 10_000),
    "zeros before a chunk's size": (CHUNKED, b"0" * 65_536),
    "headers": ("Host: a\r\n", b"a:\r\n" * 16_384),
    "a header": ("Host: a\r\nx: ", b"x" * 65_536),
    "an encoding that is not read": ("Host: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", b"5\r\nhello\r\n" * 6_000),
    "chunks encoded twice": ("Transfer-Encoding: chunked\r\n" + CHUNKED, b"5\r\nhello\r\n" * 6_000),
}


async def test_no_server_takes_what_is_no_body_without_end(server: Server) -> None:
    port, paths = server
    before = rss()
    ways = [(attack, paths[0]) for attack in ENDLESS] + [("small trailers", path) for path in paths[1:]]

    async def attack(name: str, path: str) -> None:
        head, piece = ENDLESS[name]
        sent, answer = await send_without_end(port, f"POST {path} HTTP/1.1\r\n{head}".encode(), piece)
        assert sent < TAKEN, (name, path, sent)
        assert answer == b"" or 400 <= int(answer.split(b" ")[1]) < 502, (name, path, answer[:100])
        assert answer.count(b"HTTP/1.1 ") <= 1, (name, path, answer)

    await asyncio.gather(*(attack(*way) for way in ways))
    assert rss() - before < HELD
    assert (await exchange(port, request("GET", "/health"))).status in (200, 404)


async def test_an_answer_before_the_end_of_its_request_is_the_only_one(server: Server) -> None:
    port, _ = server
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST /nowhere HTTP/1.1\r\n{CHUNKED}1\r\n \r\n".encode())
    first = await asyncio.wait_for(read_answer(reader), 20)
    assert first.status in (404, 405)
    writer.write(b"0\r\na: b\r\n\r\n")
    assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()


async def test_unfinished_bodies_hold_no_more_than_the_budget_and_give_it_back(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, paths = server
    monkeypatch.setattr(PROCESS, "total", 4 * MIB)
    for path in paths:
        begun = request("POST", path, b" " * MIB, content_length=str(2 * MIB), content_type="application/json")
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        for _, writer in connections:
            writer.write(begun)
        waiting: set[asyncio.Task[Answer]] = {asyncio.create_task(read_answer(reader)) for reader, _ in connections}
        answers: list[Answer] = []
        while len(answers) < 4:
            done, waiting = await asyncio.wait(waiting, timeout=30, return_when=asyncio.FIRST_COMPLETED)
            assert done, (path, "holds more than its budget")
            answers += [task.result() for task in done]
        assert PROCESS.held <= 4 * MIB
        for answer in answers:
            assert answer.status in (200, 413, 429), (path, answer)
            assert answer.status != 429 or int(answer.headers["retry-after"]) >= 1
        for task in waiting:
            task.cancel()
        for _, writer in connections:
            writer.transport.abort()
        await asyncio.gather(*waiting, return_exceptions=True)
        while PROCESS.held:  # noqa: ASYNC110 -- the server's event
            await asyncio.sleep(0.01)


BODIES = {
    "nothing": b"",
    "no JSON": b"{",
    "no text": b"\xff\xfe",
    "a list": b"[1]",
    "text": b'"x"',
    "null": b"null",
    "wrong values": b'{"api_key": [], "rollout_id": {}, "model": [], "messages": 1}',
    "deep": b"[" * 100_000,
    "large": b" " * (33 * MIB),
}


@pytest.mark.parametrize("body", BODIES)
async def test_no_body_is_a_fault_of_the_server(server: Server, body: str, caplog: pytest.LogCaptureFixture) -> None:
    port, paths = server
    for path in paths:
        for content_type in ("application/json", "application/x-protobuf", "text/plain"):
            if body == "large" and content_type != "application/json":
                continue
            request_bytes = request("POST", path, BODIES[body], content_type=content_type)
            answer = await told(port, request_bytes)
            assert answer.status < 500, (path, content_type, answer)
            assert body != "large" or answer.status in (413, 200), (path, answer.status)
    assert not [record for record in caplog.records if record.levelname == "ERROR"], caplog.text


async def test_no_server_answers_a_page_under_its_own_name_or_takes_what_it_posts(server: Server) -> None:
    port, paths = server
    for path in ["/health", *paths]:
        method = "GET" if path == "/health" else "POST"
        rebound = await exchange(port, request(method, path, b"{}", host="page.example"))
        assert (rebound.status, rebound.json["error_type"]) == (403, "HostNotAllowed"), path
        for host in (f"127.0.0.1:{port}", "localhost", f"[::1]:{port}"):
            assert (await exchange(port, request(method, path, b"{}", host=host))).status != 403, (path, host)
        for host in ("127.0.0.1:80@page.example", "127.0.0.1:x", "127.0.0.1:1:2", "[::1]page.example", "[::1]:80@page"):
            rebound = await exchange(port, request(method, path, b"{}", host=host))
            assert (rebound.status, rebound.json["error_type"]) == (403, "HostNotAllowed"), (path, host)
    for path in paths:
        for origin in (
            "https://page.example",
            "x://127.0.0.1",
            "127.0.0.1",
            "http://127.0.0.1@page",
            "null",
            "://127.0.0.1",
        ):
            posted = await exchange(port, request("POST", path, b"{}", content_type="text/plain", origin=origin))
            assert (posted.status, posted.json["error_type"]) == (403, "OriginNotAllowed"), (path, origin)
        twice = request("POST", path, b"{}", origin="http://page.example", Origin="http://127.0.0.1")
        assert (await exchange(port, twice)).status == 400, path


@pytest.mark.parametrize("name", EVERY_SERVER)
async def test_every_server_answers_under_a_name_that_the_environment_adds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGL_TOKEN", raising=False)
    monkeypatch.setenv("AGL_ALLOWED_HOSTS", "box.example, other.example")
    async with EVERY_SERVER[name](tmp_path) as (port, _):
        for host, refused in (("box.example", False), ("127.0.0.1", False), ("page.example", True)):
            answer = await exchange(port, request("GET", "/health", host=host))
            assert (answer.status == 403) is refused, (host, answer)
