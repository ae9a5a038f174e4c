"""The output of `make bench-store`: figures with their targets, and the clock and yardstick of the measurements.

The older system's figures were measured with the same operations on two cores of the same kind (medians of three runs).
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

QUIET_STEPS_PER_SECOND = 14.7e6
"""Result of `steps_per_second` on a machine like that of the older system's figures, when it is otherwise idle."""


@dataclass(frozen=True)
class Figure:
    """One measured figure. Without a target it is only reported."""

    name: str
    value: float | None
    """None if it could not be measured; `note` says why."""
    target: float | None = None
    at_most: bool = False
    """The target is an upper bound, not a lower one."""
    older: float | None = None
    """The same figure of the older system."""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """True if the target is met; None without a target or a value."""
        if self.value is None or self.target is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target

    def line(self) -> str:
        """Return the figure as one line of the table."""
        sign = "" if self.target is None else ("<= " if self.at_most else ">= ")
        verdict = {True: "met", False: "MISSED", None: "" if self.value is not None else "skipped"}[self.met]
        cells = (_number(self.value), sign + _number(self.target), _number(self.older), verdict)
        return f"{self.name:62} {cells[0]:>10} {cells[1]:>13} {cells[2]:>9}  {cells[3]:7} {self.note}".rstrip()


HEAD = f"{'figure':62} {'value':>10} {'target':>13} {'older':>9}  verdict"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def percentile(values: Sequence[float], part: float) -> float:
    """Return the value below which `part` (0 to 1) of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def steps_per_second() -> float:
    """Return the speed of a fixed loop of plain Python, to distinguish a slow machine from a slow store."""
    rates: list[float] = []
    for _ in range(5):
        began, table, total = clock(), {}, 0
        for i in range(100_000):
            total += i & 7
            table[i & 1023] = total
        rates.append(100_000 / (clock() - began))
    return statistics.median(rates)


def clock() -> float:
    """Return seconds less those in which this thread was ready to run and another had its core (Linux; else wall)."""
    return time.perf_counter() - _queued()


_descriptors: dict[int, int] = {}


def _queued() -> float:
    thread = threading.get_native_id()
    with contextlib.suppress(OSError, IndexError):
        if thread not in _descriptors:
            _descriptors[thread] = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)
        return int(os.pread(_descriptors[thread], 64, 0).split()[1]) / 1e9
    return 0.0


def cpu_seconds(pid: int) -> float:
    """Return the processor time that the threads of a process have used; on Linux in nanoseconds, else in ticks."""
    with contextlib.suppress(OSError, IndexError):
        threads = os.listdir(f"/proc/{pid}/task")
        return sum(int(_text(f"/proc/{pid}/task/{thread}/schedstat").split()[0]) for thread in threads) / 1e9
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()


def wait_for_quiet(limit: float) -> None:
    """Wait until other programs hardly use the machine for two seconds, at most `limit` seconds."""
    end, calm = time.monotonic() + limit, 0
    while calm < 2 and time.monotonic() < end:
        share = MachineShare()
        time.sleep(1.0)
        calm = calm + 1 if share.of_others() < 0.12 else 0


class MachineShare:
    """The share of the machine that other programs use from now on."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.monotonic(), _busy(), _own()

    def of_others(self) -> float:
        """Return their share of the available processor time, from 0 to 1. Our children count once they have ended."""
        cores = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        return max(0.0, ((_busy() - self._busy) - (_own() - self._own)) / cores)


def _busy() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0)


def _own() -> float:
    times = psutil.Process().cpu_times()
    return times.user + times.system + times.children_user + times.children_system
