"""Processes of the store benchmarks: a part that lives in a separate process and is called over a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from agentlightning.store.client_server import LightningStoreClient
from bench.store_figures import cpu_seconds


class Part:
    """An object in a child process: made there, opened on its event loop, called by method name, closed at the end."""

    async def open(self) -> Any:
        """Begin; the return value becomes the child's `opened`."""

    async def close(self) -> None:
        """End."""


class ClientPart(Part):
    """A part with a client of a store server."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    async def open(self) -> None:
        self._store = LightningStoreClient(self._endpoint)

    async def close(self) -> None:
        await self._store.close()


class Child:
    """A process that holds one part. A context manager; owned by one thread."""

    def __init__(self, make: Callable[..., Part], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_live, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self.opened = self.answer()
        """The result of the part's `open`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        """Close the part and end the process; by force if it does not end by itself."""
        with contextlib.suppress(OSError):  # it has ended already
            self._pipe.send(None)
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def ask(self, method: str, *arguments: Any) -> None:
        """Call a method of the part; `answer` returns its result."""
        self._pipe.send((method, arguments))

    def answer(self) -> Any:
        """Wait for the result of the last call."""
        return self._pipe.recv()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the part and wait for its result."""
        self.ask(method, *arguments)
        return self.answer()

    def cpu_seconds(self) -> float:
        """Return the processor time that the process has used."""
        assert self._process.pid is not None
        return cpu_seconds(self._process.pid)


def _live(pipe: Connection, make: Callable[..., Part], arguments: tuple[Any, ...]) -> None:
    asyncio.run(_answer_all(pipe, make(*arguments)))


async def _answer_all(pipe: Connection, part: Part) -> None:
    pipe.send(await part.open())
    while (order := await asyncio.to_thread(pipe.recv)) is not None:
        method, arguments = order
        work: Coroutine[Any, Any, Any] = getattr(part, method)(*arguments)
        pipe.send(await work)
    await part.close()
