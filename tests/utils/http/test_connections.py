"""Kept connections to one server: what is sent, what is read, and what becomes of what goes wrong."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import ssl
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentlightning.errors import BadRequestError
from agentlightning.utils.http.connections import BrokenAnswerError, HttpConnections, NotConnectedError

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@asynccontextmanager
async def serving(serve: Serve, tls: ssl.SSLContext | None = None, path: str = "") -> AsyncIterator[HttpConnections]:
    """A server that speaks as `serve` does, and connections to it."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
    scheme, name = ("https", "localhost") if tls else ("http", "127.0.0.1")
    connections = HttpConnections(f"{scheme}://{name}:{server.sockets[0].getsockname()[1]}{path}", connect_seconds=5.0)
    try:
        yield connections
    finally:
        connections.close()
        server.close()
        await server.wait_closed()


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
    return head, await reader.readexactly(int(length.split(b":")[1]))


def answering(*answers: bytes) -> Serve:
    """Give these answers, one after the other, on each connection, and then close it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await read_request(reader)
            writer.write(answer)

    return serve


async def test_requests_one_after_the_other_share_a_connection_and_those_at_one_time_do_not() -> None:
    opened, heads = 0, list[bytes]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        while True:
            head, body = await read_request(reader)
            heads.append(head)
            writer.write(b"HTTP/1.1 201 Made\r\nX-Name: v\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))

    async with serving(serve, path="/pre fix") as connections:
        for body in (b"one", b"", b"x" * 5_000_000):
            answer = await connections.request("POST", "/a%2Fb", {"x-one": "1"}, body, 10.0)
            assert (answer.status, answer.content, answer.header("x-name")) == (201, body, "v")
        assert opened == 1
        assert heads[0].startswith(b"POST /pre%20fix/a%2Fb HTTP/1.1\r\nhost: 127.0.0.1:")
        assert b"\r\nx-one: 1\r\n" in heads[0]
        bodies = [b"%d" % number for number in range(5)]
        answers = await asyncio.gather(*(connections.request("POST", "/", {}, body, 10.0) for body in bodies))
        assert [answer.content for answer in answers] == bodies
        assert opened == 5
        await connections.request("GET", "/", {}, None, 10.0, fresh=True)
        assert opened == 6


async def test_an_answer_is_read_in_every_form_that_http_has() -> None:
    forms = [
        OK,
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\n\r\nok",
    ]
    for form in forms:
        async with serving(answering(form)) as connections:
            assert (await connections.request("GET", "/", {}, None, 10.0)).content == b"ok", form


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"220 smtp.example ESMTP\r\n", "not an HTTP response"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\n" + b"x-many: 1\r\n" * 20_000 + b"\r\n", "head of the response"),
        (b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", "another protocol|closed"),
        (b"", "closed the connection"),
    ],
)
async def test_what_is_no_answer_is_an_error_of_the_connection(answer: bytes, text: str) -> None:
    async with serving(answering(answer)) as connections:
        with pytest.raises(ConnectionError, match=text):
            await connections.request("GET", "/", {}, None, 10.0)


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 3\r\n\r\nok", 503),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nlong one!", 200),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\nlong one!\r\n0\r\n\r\n", 200),
    ],
)
async def test_an_answer_that_is_cut_or_above_the_bound_says_which_status_it_had(answer: bytes, status: int) -> None:
    async with serving(answering(answer)) as stub:
        connections = HttpConnections(f"http://127.0.0.1:{stub._port}", connect_seconds=5.0, most_bytes=8)
        with pytest.raises(BrokenAnswerError) as broken:
            await connections.request("GET", "/", {}, None, 10.0)
        assert broken.value.status == status
        connections.close()


async def test_where_nothing_listens_nothing_was_sent() -> None:
    async with serving(answering(OK)) as connections:
        pass
    with pytest.raises(NotConnectedError):
        await connections.request("GET", "/", {}, None, 10.0)


async def test_a_refusal_that_comes_before_the_whole_body_was_sent_is_read() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too large\r\nconnection: close\r\ncontent-length: 2\r\n\r\nno")
        await writer.drain()
        while await reader.read(1 << 20):
            pass

    async with serving(serve) as connections:
        answer = await connections.request("POST", "/", {}, bytes(64 << 20), 10.0)
        assert (answer.status, answer.content) == (413, b"no")


async def test_a_caller_that_gives_up_leaves_no_answer_for_the_next_one() -> None:
    event = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            _, body = await read_request(reader)
            if body == b"slow":
                event.set()
                await asyncio.sleep(0.05)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))

    async with serving(serve) as connections:
        with pytest.raises(TimeoutError):
            await connections.request("POST", "/", {}, b"slow", 0.01)
        event.clear()
        cancelled = asyncio.create_task(connections.request("POST", "/", {}, b"slow", 10.0))
        await event.wait()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await asyncio.sleep(0.1)
        assert (await connections.request("POST", "/", {}, b"next", 10.0)).content == b"next"


async def test_a_connection_that_the_server_closed_or_spoke_on_is_not_used_again() -> None:
    async with serving(answering(OK)) as connections:
        for _ in range(3):
            assert (await connections.request("GET", "/", {}, None, 10.0)).content == b"ok"
            await asyncio.sleep(0.05)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)
        await asyncio.sleep(0.02)
        writer.write(b"HTTP/1.1 408 Late\r\ncontent-length: 0\r\n\r\n")
        await reader.read()

    async with serving(serve) as connections:
        for _ in range(2):
            assert (await connections.request("GET", "/", {}, None, 10.0)).status == 200
            await asyncio.sleep(0.06)


async def test_the_beginning_of_an_answer_that_nobody_asked_for_is_no_part_of_the_next_one() -> None:
    more = OK + b"HTTP/1.1 200 OK\r\ncontent-length: 40\r\n\r\nother"
    async with serving(answering(more, OK)) as connections:
        for _ in range(3):
            assert (await connections.request("GET", "/", {}, None, 10.0)).content == b"ok"


async def test_headers_after_a_body_in_chunks_are_not_kept() -> None:
    form = b"HTTP/1.1 200 OK\r\nx-name: first\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n"
    async with serving(answering(form + b"x-name: second\r\nx-other: 1\r\n\r\n")) as connections:
        answer = await connections.request("GET", "/", {}, None, 10.0)
        assert (answer.content, answer.header("x-name"), answer.header("x-other")) == (b"ok", "first", None)


async def test_a_caller_that_gives_up_while_it_sends_leaves_no_error_that_nobody_reads() -> None:
    contexts: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: contexts.append(context))
    came, done = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.set()
        await done.wait()

    async with serving(serve) as connections:
        sending = asyncio.create_task(connections.request("POST", "/", {}, bytes(64 << 20), 10.0))
        await came.wait()
        (connection,) = connections._all
        while connection._room is None:  # noqa: ASYNC110  # the transport tells only the connection
            await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await asyncio.sleep(0)  # in which the connection is told that it is lost
        done.set()
    del sending, connection
    gc.collect()
    assert contexts == []


async def test_a_kept_connection_does_not_hold_its_last_answer() -> None:
    async with serving(answering(OK, OK)) as connections:
        answer = await connections.request("GET", "/", {}, None, 10.0)
        (connection,) = connections._all
        await asyncio.sleep(0)  # the step of the loop that woke this caller holds it, too
        assert not [held for held in gc.get_referrers(answer) if isinstance(held, asyncio.Future)]
        assert (connection._body, connection._headers) == ([], {})
        assert (answer.content, answer.header("content-length")) == (b"ok", "2")


async def test_an_answer_in_many_small_pieces_takes_little_more_than_its_bytes() -> None:
    pieces = [b"%04d" % (number % 10_000) for number in range(30_000)]
    chunks = b"".join(b"4\r\n%s\r\n" % piece for piece in pieces)
    held = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal held
        await read_request(reader)
        (connection,) = connections._all
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks)
        await writer.drain()
        while connection._body_bytes < 4 * len(pieces):  # noqa: ASYNC110  # nobody tells of a part of an answer
            await asyncio.sleep(0.001)
        held = sum(map(sys.getsizeof, connection._body))
        writer.write(b"0\r\n\r\n")

    async with serving(serve) as connections:
        assert (await connections.request("GET", "/", {}, None, 10.0)).content == b"".join(pieces)
    assert held < 2 * 4 * len(pieces)


async def test_a_line_break_in_a_header_is_refused() -> None:
    async with serving(answering(OK)) as connections:
        with pytest.raises(BadRequestError, match="line break"):
            await connections.request("GET", "/", {"authorization": "Bearer a\r\nx-evil: 1"}, None, 10.0)


def test_connections_of_a_loop_that_ended_without_a_word_are_closed() -> None:
    async def one() -> HttpConnections:
        server = await asyncio.start_server(answering(OK, OK), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connections = HttpConnections(f"http://127.0.0.1:{port}", connect_seconds=5.0)
        assert (await connections.request("GET", "/", {}, None, 10.0)).content == b"ok"
        server.close()
        return connections

    loop = asyncio.new_event_loop()
    connections = loop.run_until_complete(one())
    loop.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of the server, which nobody closed
        pool = list(connections._all)
        connections.close()
        [copy] = [each._transport.get_extra_info("socket").dup() for each in pool]
        with copy, pytest.raises(BrokenPipeError):
            copy.send(b"x")
        del pool, connections
        gc.collect()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
async def test_a_forked_process_that_closes_its_copies_leaves_the_connections_usable() -> None:
    async with serving(answering(OK, OK)) as connections:
        assert (await connections.request("GET", "/", {}, None, 10.0)).content == b"ok"
        pool = set(connections._all)
        child = os.fork()
        if child == 0:
            try:
                connections.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)  # noqa: ASYNC222  # it ends at once
        assert (await connections.request("GET", "/", {}, None, 10.0)).content == b"ok"
        assert connections._all <= pool


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A key and a certificate for `localhost`, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    file, names = tmp_path / "both.pem", "subjectAltName=DNS:localhost"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", str(file)]
    made = subprocess.run([*command, "-subj", "/CN=localhost", "-addext", names], check=True, capture_output=True)
    file.write_bytes(file.read_bytes() + made.stdout)
    return file


async def test_https_is_spoken_and_the_certificate_is_checked(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate)
    async with serving(answering(OK), tls) as connections:
        with pytest.raises(ssl.SSLCertVerificationError):
            await connections.request("GET", "/", {}, None, 10.0)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    async with serving(answering(OK), tls) as connections:
        assert (await connections.request("GET", "/", {}, None, 10.0)).content == b"ok"


@pytest.mark.parametrize("name", ["authorization", "Authorization"])
async def test_a_request_has_one_authorization_the_one_of_its_headers(name: str) -> None:
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(OK)

    async with serving(serve) as plain:
        address = f"http://user:pass@{plain._host}:{plain._port}"
        connections = HttpConnections(address, connect_seconds=5.0)
        await connections.request("GET", "/", {}, None, 5.0)
        await connections.request("GET", "/", {name: "Bearer t"}, None, 5.0)
        connections.close()
    values = [[line for line in head.split(b"\r\n") if line.lower().startswith(b"authorization")] for head in heads]
    assert values == [[b"authorization: Basic dXNlcjpwYXNz"], [name.encode() + b": Bearer t"]]
