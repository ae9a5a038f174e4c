"""An OpenAI-shaped model server with deterministic tokens, on a real socket, that can be told to misbehave.

    with ModelServer(answer=lambda request: "42") as model:
        proxy.update_model_list([model.entry("policy")])
        ...
        assert model.calls[0].reply["choices"][0]["token_ids"] == encode("42")

It runs on a thread of its own, so it serves sync and async tests alike. Token ids are those of a toy tokenizer (one per
word); log-probabilities depend on the position only. What it says in each dialect is in `model_replies`.
"""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from agentlightning.utils.concurrency.threads import BackgroundLoop
from tests.stubs.model_replies import REPLIES, encode, logprobs_of

__all__ = ["Exchange", "Fault", "ModelServer", "echo", "encode", "logprobs_of"]

Json = dict[str, Any]


@dataclass
class Fault:
    """A wrong answer to one request."""

    status: int = 200
    body: bytes | None = None
    """Sent as it is; None is an error body, or the good reply if `status` is 200."""
    headers: dict[str, str] = field(default_factory=dict)
    cut: Literal["", "before", "middle"] = ""
    """Close the connection before the reply, or after half of its body."""


@dataclass
class Exchange:
    """One request and its outcome."""

    request: Json
    headers: dict[str, str]
    status: int = 0
    reply: Json | None = None
    """The good reply, as sent; None for a fault."""
    client_left: bool = False
    path: str = ""


def echo(request: Json) -> str:
    """Answer with the last message's text, or with the prompt."""
    messages = request.get("messages")
    return f"you said {messages[-1].get('content') if messages else request.get('prompt')}"


class ModelServer:
    """Serves the routes of `model_replies`, `/v1/models` and `/tokenize` between entering and leaving the context.

    `answer` gives the content, or a whole message, for a request. `faults` are used up one per request, oldest first.
    """

    def __init__(
        self,
        answer: Callable[[Json], str | Json] = echo,
        *,
        tokens: bool = True,
        refused_fields: tuple[str, ...] = (),
        delay: float = 0.0,
        streams: bool = True,
    ) -> None:
        self.streams = streams
        """False answers a call for a stream in one piece, as servers do that cannot stream."""
        self.frame_gate: Callable[[int], float] = lambda index: 0.0
        """Seconds to wait before the frame with this index."""
        self.answer: Callable[[Json], str | Json] = answer
        self.tokens, self.refused_fields, self.delay = tokens, refused_fields, delay
        self.counts = True
        """False has no route that counts tokens."""
        self.get_status, self.gets = 200, 0
        """Answer to `GET /v1/models`, and the number of such requests."""
        self.models: list[Json] = []
        """Entries of the list of models."""
        self.replies = dict(REPLIES)
        self.get_headers: dict[str, dict[str, str]] = {}
        """The headers of the last GET for each path."""
        self.calls: list[Exchange] = []
        self.faults: list[Fault] = []
        self.port = 0
        self._loop = BackgroundLoop("stub-model-server")
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._transports: weakref.WeakSet[asyncio.WriteTransport] = weakref.WeakSet()
        self._open = asyncio.Event()
        self._open.set()
        self._held_from: int | None = None
        self._frames_open = asyncio.Event()
        self._news = threading.Condition()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def entry(self, model_name: str, **parameters: Any) -> Any:
        """Return the `model_list` entry that points here."""
        parameters = {"model": f"hosted_vllm/{model_name}", "api_base": self.base_url, **parameters}
        return {"model_name": model_name, "litellm_params": parameters}

    def hold(self) -> None:
        """Keep requests without an answer until `release`."""
        self._loop.loop().call_soon_threadsafe(self._open.clear)

    def hold_frames(self, index: int) -> None:
        """Keep the frames of streams from this index on until `release`."""
        self._held_from = index

    def release(self) -> None:
        for event in (self._open, self._frames_open):
            self._loop.loop().call_soon_threadsafe(event.set)

    def wait_until(self, condition: Callable[[list[Exchange]], bool], timeout: float = 10.0) -> None:
        """Block until the exchanges so far satisfy `condition`."""
        with self._news:
            assert self._news.wait_for(lambda: condition(self.calls), timeout), f"not in {timeout} s: {self.calls}"

    async def until(self, condition: Callable[[list[Exchange]], bool], timeout: float = 10.0) -> None:
        """The same without blocking the loop."""
        await asyncio.to_thread(self.wait_until, condition, timeout)

    def start(self) -> None:
        """Listen; a second start takes the same port again."""
        self._loop.submit(self._listen()).result()

    def stop(self) -> None:
        """Close the port and every connection."""
        self._loop.submit(self._close()).result()
        self._loop.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        self.stop()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port, limit=2**26)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        assert self._server is not None
        while any(_accepts(task) for task in asyncio.all_tasks()):  # noqa: ASYNC110 -- asyncio tells nobody
            await asyncio.sleep(0)
        self._server.close()
        cancelled: set[asyncio.Task[None]] = set()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for connection in self._connections - cancelled:
                connection.cancel()
                cancelled.add(connection)
            await asyncio.wait(others, timeout=0.01)
        for transport in list(self._transports):
            transport.abort()  # a close waits until what is written has gone out, which may be never
        await asyncio.sleep(0)  # each closes its socket in the next turn

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        self._transports.add(writer.transport)
        try:
            while await self._one_request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            pass  # by `_close`; asyncio logs a cancelled handler as an error
        finally:
            self._connections.remove(connection)
            writer.close()

    async def _one_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request; False when the connection is to be closed."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        if head[0].startswith("GET"):
            self.gets += 1
            self.get_headers[head[0].split()[1]] = headers
            models = json.dumps({"object": "list", "data": self.models}).encode()
            return await _send(writer, self.get_status, models, {})
        exchange = Exchange(json.loads(body), headers, path=head[0].split()[1])
        with self._news:
            self.calls.append(exchange)
            self._news.notify_all()
        exchange.client_left = not await self._wait_to_answer(reader)
        alive = not exchange.client_left and await self._reply(exchange, writer)
        with self._news:
            self._news.notify_all()
        return alive

    async def _wait_to_answer(self, reader: asyncio.StreamReader) -> bool:
        """Wait as long as an answer takes; False if the client leaves in the meantime."""
        if not self.delay and self._open.is_set():
            return True
        ready, disconnect = asyncio.ensure_future(self._ready()), asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({ready, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            return not disconnect.done()
        finally:  # `_close` waits for both when it has cancelled this
            ready.cancel()
            disconnect.cancel()
            await asyncio.wait({ready, disconnect})

    async def _ready(self) -> None:
        await asyncio.sleep(self.delay)
        await self._open.wait()

    async def _reply(self, exchange: Exchange, writer: asyncio.StreamWriter) -> bool:
        request = exchange.request
        fault = self.faults.pop(0) if self.faults else Fault()
        refused = next((name for name in self.refused_fields if request.get(name) is not None), None)
        if refused:
            error = {"error": {"message": f"Unrecognized request argument: {refused}", "param": refused}}
            fault = Fault(400, json.dumps(error).encode())
        exchange.status = fault.status
        body = fault.body
        if exchange.path not in self.replies:
            return await self._count(exchange, writer)
        make, cut = self.replies[exchange.path]
        if body is None and fault.status == 200 and not fault.cut:
            name = f"chatcmpl-{self.port}-{len(self.calls)}"
            exchange.reply = make(request, self.answer(request), name, self.tokens)
            body = json.dumps(exchange.reply).encode()
        if exchange.reply is not None and request.get("stream") and self.streams and cut is not None:
            return await self._stream(exchange, cut(exchange.reply, request), writer)
        if body is None:
            body = json.dumps({"error": {"message": f"told to answer {fault.status}", "type": "stub"}}).encode()
        return fault.cut != "before" and await _send(writer, fault.status, body, fault.headers, fault.cut == "middle")

    async def _count(self, exchange: Exchange, writer: asyncio.StreamWriter) -> bool:
        """Answer how many toy tokens a prompt has, in the spelling of vLLM or of Anthropic."""
        request = exchange.request
        if not self.counts or exchange.path not in (
            "/tokenize",
            "/v1/messages/count_tokens",
            "/v1/responses/input_tokens",
        ):
            exchange.status = 404
            return await _send(writer, 404, b'{"detail": "Not Found"}', {})
        exchange.status, count = 200, len(encode(json.dumps(request.get("messages", request.get("input")))))
        reply = {"count": count, "max_model_len": 4096} if exchange.path == "/tokenize" else {"input_tokens": count}
        return await _send(writer, 200, json.dumps(reply).encode(), {})

    async def _stream(self, exchange: Exchange, frames: list[bytes], writer: asyncio.StreamWriter) -> bool:
        """Send the reply in frames, a word each; the connection closes at the end."""
        head = b"HTTP/1.1 200 Stub\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        writer.write(head)
        try:
            for index, frame in enumerate(frames):
                await asyncio.sleep(self.frame_gate(index))
                if self._held_from is not None and index >= self._held_from:
                    await self._frames_open.wait()
                writer.write(frame)
                await writer.drain()
        except ConnectionError:
            exchange.client_left = True
        return False


def _accepts(task: asyncio.Task[Any]) -> bool:
    """True for asyncio's task that accepts a connection, which leaks its socket when the server closes meanwhile."""
    return getattr(task.get_coro(), "__name__", "") == "_accept_connection2"


async def _send(
    writer: asyncio.StreamWriter, status: int, body: bytes, headers: dict[str, str], half: bool = False
) -> bool:
    lines = {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
    head = f"HTTP/1.1 {status} Stub\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n"
    writer.write(head.encode() + (body[: len(body) // 2] if half else body))
    await writer.drain()
    return not half
