"""Calls through the gateway compared with direct calls to the engine: added time, calls per second, memory, streams."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from bench.gateway_engine import Engine
from bench.gateway_process import PATH, Callers, GatewayPart
from bench.store_children import Child
from bench.store_figures import Figure, percentile

RATE = 200.0
IN_FLIGHT = 32
OPEN_STREAMS = 500


@dataclass
class _Set:
    """The three processes of one measurement."""

    engine: Child
    gateway: Child
    callers: Child

    @property
    def direct(self) -> tuple[int, str]:
        """Port and path of the engine itself."""
        return self.engine.opened, PATH

    @property
    def through(self) -> tuple[int, str]:
        """Port and path of the gateway."""
        return self.gateway.opened


@contextmanager
def set_up(kind: str) -> Generator[_Set]:
    """Yield the three processes; `kind` is the kind of the gateway's store."""
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(Child(Engine))
        gateway = stack.enter_context(Child(GatewayPart, kind, engine.opened))
        yield _Set(engine, gateway, stack.enter_context(Child(Callers)))


def measure_added_time(quick: bool) -> list[Figure]:
    """Measure the time that the gateway adds to a call at 200 calls a second, in turns with the engine alone."""
    seconds, rounds = (1.0, 3) if quick else (3.0, 5)
    added: dict[float, list[float]] = {0.5: [], 0.99: []}
    alone: list[float] = []
    with set_up("memory") as bench:
        for way in (bench.direct, bench.through):
            bench.callers.call("at_rate", *way, RATE, 0.5)
        used = bench.gateway.cpu_seconds()
        for _ in range(rounds):
            direct = bench.callers.call("at_rate", *bench.direct, RATE, seconds)
            through = bench.callers.call("at_rate", *bench.through, RATE, seconds)
            alone.append(1e3 * percentile(direct, 0.5))
            for part, values in added.items():
                values.append(1e3 * (percentile(through, part) - percentile(direct, part)))
        used = 1e3 * (bench.gateway.cpu_seconds() - used) / (rounds * seconds * RATE)
        assert set(bench.gateway.call("states")) == {"ok"}
    note = f"the engine alone {statistics.median(alone):.2f}; of the added, {used:.2f} is the gateway's processor time"
    spread = ", ".join(f"{value:.1f}" for value in sorted(added[0.99]))
    return [
        Figure("added to a call at 200/s, median, ms", statistics.median(added[0.5]), 2, True, 34.8, note),
        Figure("added to a call at 200/s, 99%, ms", statistics.median(added[0.99]), 10, True, 45.9, f"rounds {spread}"),
    ]


def measure_rate(quick: bool) -> list[Figure]:
    """Measure calls per second with the store in memory and in a file, and the memory of the process after them."""
    seconds, rounds = (1.0, 2) if quick else (3.0, 3)
    figures: list[Figure] = []
    for kind in ("memory", "sqlite"):
        with set_up(kind) as bench:
            bench.callers.call("closed_loop", *bench.through, IN_FLIGHT, 0.5)
            fresh, used, calls = bench.gateway.call("mebibytes"), bench.gateway.cpu_seconds(), 0.0
            rates: list[float] = []
            for _ in range(rounds):
                rates.append(bench.callers.call("closed_loop", *bench.through, IN_FLIGHT, seconds))
                calls += rates[-1] * seconds
            each = 1e6 * (bench.gateway.cpu_seconds() - used) / calls
            grown = bench.gateway.call("mebibytes")
        note = f"{each:.0f} us of CPU a call: {1e6 / each:.0f} on a core of its own"
        target, older = (1000.0, 28.2) if kind == "memory" else (None, None)
        figures.append(Figure(f"calls per second, store: {kind}", statistics.median(rates), target, False, older, note))
        if kind == "sqlite":
            figures.append(Figure("memory of the gateway's process, MiB", grown, 150, True, 677, f"{fresh:.0f} before"))
        else:
            stored = f"{fresh:.0f} before; it holds {calls:.0f} calls"
            figures.append(Figure("memory with a store in memory, MiB", grown, note=stored))
    return figures


def measure_in_flight(quick: bool) -> list[Figure]:
    """Measure calls per second by number in flight, and the gateway's added time of the slowest with 16 of them."""
    seconds, rounds = (1.0, 3) if quick else (3.0, 5)
    rates: dict[int, list[float]] = {1: [], 16: [], 64: []}
    added: list[float] = []
    used: dict[int, float] = {}
    with set_up("memory") as bench:
        bench.callers.call("closed_loop", *bench.through, 16, 0.5)
        for _ in range(rounds):
            for in_flight, samples in rates.items():
                cpu = bench.gateway.cpu_seconds()
                took = bench.callers.call("times_in_loop", *bench.through, in_flight, seconds)
                each = 1e6 * (bench.gateway.cpu_seconds() - cpu) / len(took)
                used[in_flight] = min(each, used.get(in_flight, each))
                samples.append(len(took) / seconds)
                if in_flight == 16:
                    alone = bench.callers.call("times_in_loop", *bench.direct, in_flight, seconds)
                    added.append(1e3 * (percentile(took, 0.99) - percentile(alone, 0.99)))
    older = {1: 31.0, 16: 35.0, 64: 26.0}
    return [
        *(
            Figure(
                f"calls per second, {in_flight} in flight",
                statistics.median(samples),
                older=older[in_flight],
                note=f"{used[in_flight]:.0f} us of processor time a call at least",
            )
            for in_flight, samples in rates.items()
        ),
        Figure("added to a call with 16 in flight, 99%, ms", statistics.median(added), 10, True, 483),
    ]


def measure_streams(quick: bool) -> list[Figure]:
    """Measure the time to the first byte of a stream, and the memory of many open ones."""
    times, rounds = (50, 3) if quick else (200, 5)
    delays: list[float] = []
    with set_up("memory") as bench:
        for _ in range(rounds):
            direct, through = (bench.callers.call("first_bytes", *way, times) for way in (bench.direct, bench.through))
            delays.append(1e3 * (statistics.median(through) - statistics.median(direct)))
    with set_up("sqlite") as bench:
        before = bench.gateway.call("mebibytes")
        bench.callers.call("hold_streams", *bench.through, OPEN_STREAMS)
        during = bench.gateway.call("mebibytes")
        bench.engine.call("release")
        assert bench.callers.call("end_streams") == OPEN_STREAMS
        assert bench.gateway.call("states") == {"ok": OPEN_STREAMS}
    note = f"{before:.0f} before"
    return [
        Figure("added to the first byte of a stream, median, ms", statistics.median(delays), 2, True),
        Figure(f"memory of the process with {OPEN_STREAMS} open streams, MiB", during, 200, True, note=note),
    ]
