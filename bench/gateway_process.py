"""The gateway and its callers, as parts of separate processes."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path

import psutil

from agentlightning.llm_proxy import GatewayLimits, LLMProxy
from agentlightning.store.engine.store import EngineStore
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.store.sqlite import SQLiteLightningStore
from bench.gateway_engine import HELD, REQUEST
from bench.store_children import Part
from bench.store_server import BareConnection

PATH = "/v1/chat/completions"


class GatewayPart(Part):
    """A gateway with its store in one process, as a trainer has it; `kind` is `memory` or `sqlite`."""

    def __init__(self, kind: str, engine_port: int) -> None:
        self._kind, self._engine = kind, f"http://127.0.0.1:{engine_port}/v1"

    async def open(self) -> tuple[int, str]:
        """Return the port, and the path of an attempt's chat completions."""
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / "bench.db"
        in_memory = self._kind == "memory"
        self._store: EngineStore = InMemoryLightningStore() if in_memory else SQLiteLightningStore(path)
        parameters = {"model": "hosted_vllm/policy", "api_base": self._engine}
        self._proxy = LLMProxy(
            model_list=[{"model_name": "policy", "litellm_params": parameters}],
            store=self._store,
            limits=GatewayLimits(calls_per_attempt=1024),
        )
        await self._proxy.start()
        attempt = await self._store.start_rollout({"task": 1}, worker_id="w")
        self._ids = attempt.rollout_id, attempt.attempt.attempt_id
        url = self._proxy.as_resource(*self._ids).endpoint
        return int(url.split(":")[2].split("/")[0]), f"/{url.split('/', 3)[3]}{PATH}"

    async def close(self) -> None:
        await self._proxy.stop()
        await self._store.close()
        self._folder.cleanup()

    async def mebibytes(self) -> float:
        """Return the memory of the process, in MiB."""
        return psutil.Process().memory_info().rss / 2**20

    async def states(self) -> dict[str, int]:
        """Return the number of calls so far by their state."""
        return self._proxy.stats()["calls"]


class Callers(Part):
    """Agents in one process, over bare connections."""

    async def open(self) -> None:
        self._connections: dict[int, list[BareConnection]] = {}
        self._streams: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._body = json.dumps(REQUEST).encode()
        self._stream_body = json.dumps({**REQUEST, "stream": True}).encode()
        self._held_body = json.dumps({**REQUEST, "stream": True, "user": HELD}).encode()

    async def close(self) -> None:
        for connections in self._connections.values():
            for connection in connections:
                await connection.close()

    async def at_rate(self, port: int, path: str, rate: float, seconds: float) -> list[float]:
        """Begin calls at a fixed rate, even if earlier ones have not ended; return the seconds of each."""
        took: list[float] = []
        began = time.perf_counter()
        running: set[asyncio.Task[None]] = set()
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
            running.add(asyncio.create_task(self._one(port, path, took)))
        await asyncio.gather(*running)
        return took

    async def closed_loop(self, port: int, path: str, in_flight: int, seconds: float) -> float:
        """Keep this number of calls in flight; return the calls per second."""
        return len(await self.times_in_loop(port, path, in_flight, seconds)) / seconds

    async def times_in_loop(self, port: int, path: str, in_flight: int, seconds: float) -> list[float]:
        """Keep this number of calls in flight; return the seconds of each."""
        took: list[float] = []
        began = time.perf_counter()

        async def repeat() -> None:
            while time.perf_counter() < began + seconds:
                await self._one(port, path, took)

        await asyncio.gather(*(repeat() for _ in range(in_flight)))
        return took

    async def _one(self, port: int, path: str, took: list[float]) -> None:
        idle = self._connections.setdefault(port, [])
        connection = idle.pop() if idle else BareConnection("127.0.0.1", port)
        began = time.perf_counter()
        await connection.request("POST", path, self._body)
        took.append(time.perf_counter() - began)
        idle.append(connection)

    async def first_bytes(self, port: int, path: str, times: int) -> list[float]:
        """Begin streams one after the other; return the seconds to the first byte of the body of each."""
        took: list[float] = []
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
        for _ in range(times):
            began = time.perf_counter()
            writer.write(_request(port, path, self._stream_body))
            await reader.readuntil(b"data: ")
            took.append(time.perf_counter() - began)
            await reader.readuntil(b"[DONE]\n\n")
        writer.close()
        return took

    async def hold_streams(self, port: int, path: str, count: int) -> None:
        """Begin streams that the engine does not end, and return when each has its first frame."""

        async def begin() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            self._streams.append((reader, writer))
            writer.write(_request(port, path, self._held_body))
            await reader.readuntil(b"data: ")

        await asyncio.gather(*(begin() for _ in range(count)))

    async def end_streams(self) -> int:
        """Read the held streams to their end and return the number of those that succeeded."""
        ends = await asyncio.gather(*(reader.readuntil(b"[DONE]\n\n") for reader, _ in self._streams))
        for _, writer in self._streams:
            writer.close()
        self._streams.clear()
        return len(ends)


def _request(port: int, path: str, body: bytes) -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body
