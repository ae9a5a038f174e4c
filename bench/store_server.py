"""Servers and clients of the store benchmarks, as parts of separate processes."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from agentlightning.store.client_server import LightningStoreServer
from agentlightning.store.engine.store import EngineStore
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.store.sqlite import SQLiteLightningStore
from agentlightning.types import AttemptedRollout
from agentlightning.utils.http.auth import Receive, Scope, Send
from agentlightning.utils.server_launcher import PythonServerLauncher, PythonServerLauncherArgs
from bench.store_children import ClientPart, Part
from bench.store_spans import model_calls

CALLS_IN_FLIGHT = 16


class StoreServer(Part):
    """A store server; `kind` is `memory`, `sqlite` (a temporary file) or the address of a database."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    async def open(self) -> str:
        """Return the address."""
        self._folder = tempfile.TemporaryDirectory()
        self._store: EngineStore = self._make(Path(self._folder.name) / "bench.db")
        self._server = LightningStoreServer(self._store, port=0)
        await self._server.start()
        return self._server.endpoint

    async def close(self) -> None:
        await self._server.stop()
        await self._store.close()
        self._folder.cleanup()

    def _make(self, path: Path) -> EngineStore:
        if self._kind == "memory":
            return InMemoryLightningStore()
        if self._kind == "sqlite":
            return SQLiteLightningStore(path)
        from agentlightning.store.postgres import PostgresLightningStore

        return PostgresLightningStore(self._kind)


class BareServer(Part):
    """The same server around an ASGI function that reads the body and gives a constant answer."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]

    async def open(self) -> str:
        """Return the address."""
        self._launcher = PythonServerLauncher(self._app, PythonServerLauncherArgs(launch_mode="thread"))
        await self._launcher.start()
        return self._launcher.endpoint

    async def close(self) -> None:
        await self._launcher.stop()

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await send({"type": "http.response.body", "body": self._answer})


class Clients(ClientPart):
    """A client process with several calls in flight, over the store client or over bare connections."""

    def __init__(self, endpoint: str, number: int) -> None:
        super().__init__(endpoint)
        self._number = number

    async def open(self) -> None:
        await super().open()
        host, _, port = self._endpoint.removeprefix("http://").rpartition(":")
        self._connections = [BareConnection(host, int(port)) for _ in range(CALLS_IN_FLIGHT)]

    async def close(self) -> None:
        await super().close()
        for connection in self._connections:
            await connection.close()

    async def example(self) -> tuple[str, bytes]:
        """Return the id of a new rollout that a worker has claimed, and the server's answer to a read of it."""
        claim = await self._store.start_rollout({"task": 1}, worker_id="w")
        answer = await self._connections[0].request("GET", f"/v1/agl/rollouts/{claim.rollout_id}")
        return claim.rollout_id, answer

    async def run(self, what: str, seconds: float, at: float, *arguments: Any) -> tuple[int, float]:
        """Repeat a call from the time `at` on, with several in flight; return the number of calls and the seconds."""
        call = getattr(self, f"_{what}")
        await asyncio.sleep(max(0.0, at - time.time()))
        began = time.perf_counter()
        done = 0

        async def repeat(index: int) -> None:
            nonlocal done
            while time.perf_counter() < began + seconds:
                await call(index, *arguments)
                done += 1

        await asyncio.gather(*(repeat(index) for index in range(CALLS_IN_FLIGHT)))
        return done, time.perf_counter() - began

    async def _live(self, index: int) -> None:
        """Run the life of a rollout: enqueue, claim, ten spans in one call, end."""
        await self._store.enqueue_rollout({"task": index})
        claim = await self._store.dequeue_rollout(worker_id=f"w{self._number}-{index}")
        assert isinstance(claim, AttemptedRollout)
        await self._store.add_many_spans(model_calls(claim, 1, 10))
        await self._store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status="succeeded")

    async def _read(self, index: int, rollout_id: str) -> None:
        assert await self._store.get_rollout_by_id(rollout_id) is not None

    async def _claim_nothing(self, index: int) -> None:
        assert await self._store.dequeue_rollout(worker_id=f"w{self._number}-{index}") is None

    async def _read_bare(self, index: int, rollout_id: str) -> None:
        await self._connections[index].request("GET", f"/v1/agl/rollouts/{rollout_id}")

    async def _claim_nothing_bare(self, index: int) -> None:
        body = b'{"limit":1,"worker_id":"w%d-%d"}' % (self._number, index)
        await self._connections[index].request("POST", "/v1/agl/queues/rollouts/dequeue", body)


class BareConnection:
    """One keep-alive HTTP connection with almost no cost for its process."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._host = f"{host}:{port}"
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def request(self, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> bytes:
        """Send a request and return the body of the answer, which must be 200 or 201."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address)
        reader, writer = self._streams
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}"
        writer.write(f"{head}\r\n\r\n".encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(answer.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
        content = await reader.readexactly(length)
        assert answer.startswith((b"http/1.1 200", b"http/1.1 201")), answer + content
        return content

    async def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
