"""The time until a server answers a health request while one client misuses it: large bodies that never end, large
requests that are refused, and OTLP that is small only on the wire."""

from __future__ import annotations

import asyncio
import gzip
import json
import statistics
import time

from bench.gateway_calls import set_up
from bench.gateway_process import PATH
from bench.store_children import Child, Part
from bench.store_figures import Figure
from bench.store_server import StoreServer

_MIB = 2**20
_PAUSE_SECONDS = 0.02
_Piece = tuple[bytes, str]


def _many_messages() -> bytes:
    return b'{"model": "policy", "messages": [' + b"{}," * 2_400_000 + b"{}]}"


def _empty_spans() -> bytes:
    inner = b"\x12\x00" * 7_500_000
    for tag in (b"\x12", b"\x0a"):
        size, length = len(inner), b""
        while size >= 0x80:
            length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
        inner = tag + length + bytes([size]) + inner
    return gzip.compress(inner)


class Asker(Part):
    """Sends health requests, each over a new connection."""

    async def ask(self, port: int, seconds: float) -> list[float]:
        """Return the seconds of each answer."""
        end, took = time.perf_counter() + seconds, list[float]()
        while time.perf_counter() < end:
            began = time.perf_counter()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert (await reader.readline()).split()[1] == b"200"
            took.append(time.perf_counter() - began)
            writer.transport.abort()
            await asyncio.sleep(_PAUSE_SECONDS)
        return took


class Attacker(Part):
    """Sends one attack over and over."""

    async def open(self) -> None:
        self._bodies = {
            "unfinished": b" " * (31 * _MIB),
            "name": json.dumps({"model": "x" * (30 * _MIB), "messages": [{"role": "user", "content": "hi"}]}).encode(),
            "messages": _many_messages(),
            "spans": _empty_spans(),
        }

    async def attack(self, port: int, path: str, name: str, senders: int, seconds: float) -> None:
        """Attack for this number of seconds."""
        end = time.perf_counter() + seconds
        sending = [asyncio.create_task(self._send(port, path, name, end)) for _ in range(senders)]
        await asyncio.wait(sending, timeout=seconds)
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)

    async def _send(self, port: int, path: str, name: str, end: float) -> None:
        body, kind = self._bodies[name], "application/x-protobuf" if name == "spans" else "application/json"
        encoding = "Content-Encoding: gzip\r\n" if name == "spans" else ""
        length = len(body) + (_MIB if name == "unfinished" else 0)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\n{encoding}Content-Length: {length}\r\n"
        )
        while time.perf_counter() < end:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(head.encode() + b"\r\n")
                for at in range(0, len(body), _MIB):
                    writer.write(body[at : at + _MIB])
                    await writer.drain()
                await reader.readline()
            except ConnectionError:
                pass
            finally:
                writer.transport.abort()


def measure_attacks(quick: bool) -> list[Figure]:
    """Measure median and worst answer of `/health` at the gateway, and under OTLP at the store; also the memory."""
    seconds = 2.0 if quick else 6.0
    figures: list[Figure] = []
    with set_up("memory") as bench, Child(Attacker) as attacker, Child(Asker) as asker:
        before, (port, path) = bench.gateway.call("mebibytes"), bench.through
        assert path.endswith(PATH)
        for name, senders in (("unfinished", 40), ("name", 2), ("messages", 2)):
            attacker.ask("attack", port, path, name, senders, seconds)
            figures.append(_figure(f"gateway, {name}", asker.call("ask", port, seconds)))
            attacker.answer()
        held = bench.gateway.call("mebibytes")
        figures.append(Figure("memory of the gateway after them, MiB", held, note=f"{before:.0f} before"))
    with Child(StoreServer, "memory") as server, Child(Attacker) as attacker, Child(Asker) as asker:
        port = int(server.opened.rpartition(":")[2])
        attacker.ask("attack", port, "/v1/traces", "spans", 2, seconds)
        figures.append(_figure("store, spans", asker.call("ask", port, seconds)))
        attacker.answer()
    return figures


def _figure(attack: str, took: list[float]) -> Figure:
    note = f"median {1e3 * statistics.median(took):.1f} of {len(took)} answers"
    return Figure(f"/health while attacked ({attack}), worst, ms", 1e3 * max(took), 50, True, note=note)
