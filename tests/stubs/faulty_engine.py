"""A model server that fails on request: the name of the model sets the way in which it fails.

    with FaultyEngine({"policy": closes_without_a_byte}) as engine:
        proxy.update_model_list([engine.entry("policy")])

It writes its answers byte by byte itself, so that nothing between a test and the socket puts them right.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from agentlightning.utils.concurrency.threads import BackgroundLoop
from tests.stubs.model_replies import REPLIES

Json = dict[str, Any]
_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n"
CHUNKED = _STREAM + b"Transfer-Encoding: chunked\r\n\r\n"
UNTIL_CLOSED = _STREAM + b"\r\n"


def whole(status: int, body: bytes) -> bytes:
    """Return an HTTP answer with a body in one piece."""
    lines = ("Content-Type: application/json", f"Content-Length: {len(body)}", "Connection: close")
    head = f"HTTP/1.1 {status} Stub\r\n" + "".join(f"{line}\r\n" for line in lines) + "\r\n"
    return head.encode() + body


def chunked(frames: list[bytes]) -> bytes:
    """Return frames in the chunked transfer coding (RFC 9112, section 7.1), with its end."""
    return b"".join(b"%x\r\n%s\r\n" % (len(frame), frame) for frame in [*frames, b""])


@dataclass
class Request:
    """One request, and the connection on which it is answered. The connection is closed when the answer is over."""

    asked: Json
    path: str
    number: int
    """Number of the request among all, from 1 on."""
    repeated: bool
    """True if the same request came before."""
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter

    @property
    def streamed(self) -> bool:
        return bool(self.asked.get("stream"))

    def reply(self, text: str = "one two three", tokens: bool = True) -> Json:
        """Return a good reply with the requested tokens."""
        return REPLIES[self.path][0](self.asked, text, f"reply-{self.number:06}", tokens)

    def frames(self, text: str = "one two three", tokens: bool = True) -> list[bytes]:
        """Return the same as the frames of a stream."""
        cut = REPLIES[self.path][1]
        assert cut is not None
        return cut(self.reply(text, tokens), self.asked)

    def good(self, text: str = "one two three", tokens: bool = True) -> bytes:
        """Return a whole good answer, as a stream if the request asks for one."""
        if self.streamed:
            return CHUNKED + chunked(self.frames(text, tokens))
        return whole(200, json.dumps(self.reply(text, tokens)).encode())

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def until_left(self) -> None:
        """Return when the client closes the connection."""
        await self._reader.read(1)

    def reset(self) -> None:
        """Break the connection instead of closing it: the client gets RST, not FIN."""
        linger = struct.pack("ii", 1, 0)
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._writer.transport.abort()


Way = Callable[[Request], Awaitable[None]]
"""Answers one request."""


class FaultyEngine:
    """Listens between entering and leaving the context; on a thread of its own."""

    def __init__(self, ways: Mapping[str, Way]) -> None:
        self.ways = dict(ways)
        self.port = 0
        self.requests = 0
        self._seen: set[bytes] = set()
        self._loop = BackgroundLoop("faulty-engine")
        self._serving: set[asyncio.Task[Any] | None] = set()
        self._server: asyncio.Server | None = None
        self._news = threading.Condition()

    def entry(self, name: str, **more: Any) -> Any:
        """Return the `model_list` entry of a model."""
        parameters = {"model": name, "api_base": f"http://127.0.0.1:{self.port}/v1", **more}
        return {"model_name": name, "litellm_params": parameters}

    @property
    def entries(self) -> list[Any]:
        """The entries of all models."""
        return [self.entry(name) for name in self.ways]

    async def asked(self, times: int, timeout: float = 20.0) -> None:
        """Return when that many requests have come."""

        def wait() -> None:
            with self._news:
                assert self._news.wait_for(lambda: self.requests >= times, timeout), f"only {self.requests} requests"

        await asyncio.to_thread(wait)

    def __enter__(self) -> Self:
        self._loop.submit(self._listen()).result()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.submit(self._close()).result()
        self._loop.stop()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in [task for task in self._serving if task is not None]:
            task.cancel()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.add(asyncio.current_task())
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):  # its list of models, by which engines are told apart; it is well
                writer.write(whole(200, b'{"object": "list", "data": []}'))
                return
            length = int(head.lower().split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
            body = await reader.readexactly(length)
            content, path = json.loads(body), head.split()[1].decode()
            with self._news:
                self.requests += 1
                self._news.notify_all()
            request = Request(content, path, self.requests, body in self._seen, reader, writer)
            self._seen.add(body)
            await self.ways[content["model"]](request)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client has left, or the engine stops
        finally:
            self._serving.discard(asyncio.current_task())
            writer.close()
