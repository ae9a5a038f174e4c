"""`make bench-store`: the figures of the store with their targets, and what the older system reached.

Everything is measured on this machine in one run. Rates of one process use a clock that excludes the time in which
others had the core; all else is wall time, so measure on a quiet machine. Exit 0 only if every target is met.
"""

from __future__ import annotations

import sys

from bench.parts import Part, options_of, run_parts
from bench.store_durable import measure_durable
from bench.store_http import measure_http
from bench.store_idle import measure_idle_polls
from bench.store_memory import measure_memory
from bench.store_otlp import measure_otlp
from bench.store_waiting import measure_long_waits, measure_wake_ups

PARTS: dict[str, Part] = {
    "memory": lambda options: measure_memory(options.quick),
    "http": lambda options: measure_http(options.quick),
    "durable": lambda options: measure_durable(options.quick),
    "otlp": lambda options: measure_otlp(options.quick),
    "wake": lambda options: measure_wake_ups(options.quick),
    "wait": lambda options: measure_long_waits(options.quick),
    "idle": lambda options: measure_idle_polls(options.quick),
}


if __name__ == "__main__":
    sys.exit(run_parts(options_of(__doc__, PARTS), PARTS))
