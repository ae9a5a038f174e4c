"""A proxy that does to HTTP requests what networks and dying processes do: it loses, cuts, delays and doubles them.

It stands between clients and a store server on loopback, in the event loop that starts it. What befalls a request is
drawn from a seeded generator, or planned for the next request to a path (`plan`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal
from urllib.parse import unquote_to_bytes

Fate = Literal[
    "pass",
    "slow",  # held up before it is sent on, and its answer too
    "lost request",  # never arrives
    "torn request",  # half of it arrives, then the connection is cut
    "impatient client",  # arrives; the connection to the client is cut at once, so that its next try meets this one
    "gone client",  # arrives; both connections are cut at once
    "lost answer",  # done, and nobody is told
    "torn answer",  # done, and half of the answer is told
    "doubled",  # arrives twice at the same time; the client gets the answer of one of them
    "echoed",  # arrives, is answered, and arrives once more later
    "silence",  # done; the connection stays open, and nothing ever comes back over it
    "deaf",  # never arrives; the connection stays open, and nothing ever comes back over it
]
CHANCES: Mapping[Fate, float] = {
    "pass": 64,
    "slow": 4,
    "lost request": 4,
    "torn request": 2,
    "impatient client": 6,
    "gone client": 4,
    "lost answer": 4,
    "torn answer": 2,
    "doubled": 6,
    "echoed": 4,
}
_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Between = Callable[[], Awaitable[object]]


class FaultyProxy:
    """Listens on a port of its own and sends requests on to `port`; used as an asynchronous context manager."""

    def __init__(
        self, port: int, seed: int, *, chances: Mapping[Fate, float] = CHANCES, longest_delay: float = 0.02
    ) -> None:
        self.seen: Counter[Fate] = Counter()
        self._port = port
        self._random = random.Random(seed)
        self._fates, self._weights = list(chances), list(chances.values())
        self._longest_delay = longest_delay
        self._plans: dict[bytes, tuple[Fate, Between | None]] = {}
        self._nth: list[tuple[re.Pattern[str], list[int], Fate]] = []
        self._tasks: set[asyncio.Task[object]] = set()
        self._idle: list[_Stream] = []
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> FaultyProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _, writer in self._idle:
            writer.close()

    @property
    def endpoint(self) -> str:
        """URL for the clients."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def plan(self, path: str, fate: Fate, between: Between | None = None) -> None:
        """Give the next request to a path this fate; `between` is awaited before the client is answered."""
        self._plans[path.encode()] = (fate, between)

    def plan_nth(self, path: str, fate: Fate, *numbers: int) -> None:
        """Give the requests of these numbers (1 is the next) this fate, counting those whose path matches."""
        self._nth.append((re.compile(path), list(numbers), fate))

    def plan_nothing(self) -> None:
        """Forget the plans."""
        self._plans.clear()
        self._nth.clear()

    async def settle(self) -> None:
        """Return when every copy under way has arrived and has been answered."""
        while copies := [task for task in self._tasks if task.get_name() == "copy"]:
            await asyncio.wait(copies)

    # --- one connection --------------------------------------------------------------------------------------------

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._keep(asyncio.create_task(self._serve(reader, writer), name="connection"))

    def _keep(self, task: asyncio.Task[object]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._answer_one(reader, writer):
                    pass
        finally:
            writer.close()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Take one request; False if nothing more is answered on this connection."""
        request = await read_message(reader)
        fate, between = self._fate_of(request)
        self.seen[fate] += 1
        if fate in ("silence", "deaf"):
            await self._fall_silent(fate, request, reader)
            return False
        answer = await self._meet(fate, request, between)
        if answer is None:
            return False
        writer.write(answer[: len(answer) // 2] if fate == "torn answer" else answer)
        await writer.drain()
        return fate != "torn answer"

    def _fate_of(self, request: bytes) -> tuple[Fate, Between | None]:
        path = unquote_to_bytes(request.split(b" ", 2)[1])
        if path in self._plans:
            return self._plans.pop(path)
        for pattern, numbers, fate in self._nth:
            if pattern.fullmatch(path.decode()):
                numbers[:] = [number - 1 for number in numbers]
                if 0 in numbers:
                    return fate, None
        return self._random.choices(self._fates, self._weights)[0], None

    async def _meet(self, fate: Fate, request: bytes, between: Between | None) -> bytes | None:
        """Apply its fate to a request; return the answer for the client, None to cut its connection."""
        if fate == "lost request":
            return None
        if fate in ("torn request", "gone client"):
            await self._send_and_hang_up(request[: len(request) // 2] if fate == "torn request" else request)
            return None
        if fate == "impatient client":
            self._send_a_copy(request, 0.0)
            await asyncio.sleep(self._delay() / 4)
            return None
        if fate == "slow":
            await asyncio.sleep(self._delay())
        if fate == "doubled":
            self._send_a_copy(request, 0.0)
        answer = await self._forward(request)
        if between is not None:
            await between()
        if fate == "lost answer":
            return None
        if fate == "slow":
            await asyncio.sleep(self._delay())
        if fate == "echoed":
            self._send_a_copy(request, self._delay())
        return answer

    async def _fall_silent(self, fate: Fate, request: bytes, reader: asyncio.StreamReader) -> None:
        """Hold the connection open until the client closes it."""
        if fate == "silence":
            self._send_a_copy(request, 0.0)
        while await reader.read(1 << 16):
            pass

    def _delay(self) -> float:
        return self._random.uniform(0.0, self._longest_delay)

    # --- towards the server ----------------------------------------------------------------------------------------

    def _send_a_copy(self, request: bytes, after: float) -> None:
        async def send() -> None:
            await asyncio.sleep(after)
            await self._forward(request)

        self._keep(asyncio.create_task(send(), name="copy"))

    async def _forward(self, request: bytes) -> bytes:
        while True:
            fresh = not self._idle
            reader, writer = await self._connect() if fresh else self._idle.pop()
            try:
                writer.write(request)
                answer = await read_message(reader)
            except (ConnectionError, asyncio.IncompleteReadError):
                writer.close()
                if fresh:
                    raise
                continue  # the server had closed an idle connection
            except asyncio.CancelledError:
                writer.close()
                raise
            self._idle.append((reader, writer))
            return answer

    async def _send_and_hang_up(self, data: bytes) -> None:
        _, writer = await self._connect()
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(self._delay() / 4)
        writer.close()

    async def _connect(self) -> _Stream:
        return await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """Return one HTTP/1.1 request or answer, head and body, whose length its head states.

    Raises:
        asyncio.IncompleteReadError: the connection ended before or within it.
    """
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return head + await reader.readexactly(int(value))
    assert b"transfer-encoding" not in head.lower(), head
    return head
