"""The store behind HTTP: the life of a rollout with two client processes; reads and empty claims against bare ASGI."""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass
from typing import Any

from bench.store_children import Child
from bench.store_figures import Figure
from bench.store_server import BareServer, Clients, StoreServer

_CLIENTS = 2


@dataclass
class Load:
    """The result of a load."""

    rate: float
    server_us: float
    """Processor time of the server per unit, in microseconds."""
    clients_us: float
    """The same of all clients."""


def load(server: Child, clients: list[Child], what: str, seconds: float, *arguments: Any) -> Load:
    """Make every client repeat a call for this number of seconds."""
    ends = (server, *clients)
    before, at = [end.cpu_seconds() for end in ends], time.time() + 0.1
    for client in clients:
        client.ask("run", what, seconds, at, *arguments)
    results = [client.answer() for client in clients]
    done = sum(count for count, _ in results)
    used = [1e6 * (end.cpu_seconds() - then) / max(1, done) for end, then in zip(ends, before, strict=True)]
    return Load(done / max(duration for _, duration in results), used[0], sum(used[1:]))


def measure_http(quick: bool) -> list[Figure]:
    """Measure a memory store behind HTTP, and in turns a bare ASGI function behind the same server."""
    seconds, rounds = (0.5, 3) if quick else (1.5, 5)
    with contextlib.ExitStack() as stack:

        def child(make: Any, *arguments: Any) -> Child:
            return stack.enter_context(Child(make, *arguments))

        server = child(StoreServer, "memory")
        ours = [child(Clients, server.opened, number) for number in range(_CLIENTS)]
        lives = [load(server, ours, "live", seconds) for _ in range(rounds)]
        rollout_id, answer = ours[0].call("example")
        bare = {"read": child(BareServer, answer), "claim_nothing": child(BareServer, b"[]")}
        of_bare = {what: [child(Clients, bare[what].opened, n) for n in range(_CLIENTS)] for what in bare}
        server_us = statistics.median(life.server_us for life in lives)
        clients_us = statistics.median(life.clients_us for life in lives)
        rate = statistics.median(life.rate for life in lives)
        note = f"processor time allows {2e6 / (server_us + clients_us):.0f} on two idle cores"
        figures = [
            Figure(f"http: life of a rollout, {_CLIENTS} clients, per s", rate, 15 * 32, older=32, note=note),
            Figure("http: server CPU per life, us", server_us, older=30_833, note=f"clients {clients_us:.0f}"),
        ]
        for what, label, older in (("read", "read", 712), ("claim_nothing", "empty claim", 567)):
            arguments = (rollout_id,) if what == "read" else ()
            for way, client in (("", "store client"), ("_bare", "bare client")):
                pairs = [
                    (
                        load(server, ours, what + way, seconds, *arguments),
                        load(bare[what], of_bare[what], what + way, seconds, *arguments),
                    )
                    for _ in range(rounds)
                ]
                rate = statistics.median(of_ours.rate for of_ours, _ in pairs)
                part = statistics.median(of_ours.rate / bare_asgi.rate for of_ours, bare_asgi in pairs)
                cpu = statistics.median(of_ours.server_us for of_ours, _ in pairs)
                bare_cpu = statistics.median(bare_asgi.server_us for _, bare_asgi in pairs)
                figures += [
                    Figure(f"http: {label}, {client}, per s", rate, older=None if way else older),
                    Figure(f"http: {label}, {client}, part of bare ASGI's rate", part, 0.6),
                    Figure(f"http: {label}, {client}, server CPU us", cpu, note=f"bare ASGI {bare_cpu:.0f}"),
                ]
        return figures
