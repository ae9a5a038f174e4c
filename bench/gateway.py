"""`make bench-gateway`: the figures of the gateway, the adapters and the tracer, with their targets and verdicts.

Everything is measured on this machine in one run: the added time of the gateway is the difference to direct calls to
the engine, in turns. Three processes share the cores (callers, gateway, engine), so measure on a quiet machine. Exit 0
only if every target is met.
"""

from __future__ import annotations

import sys

from bench.adapter import measure_adapters
from bench.adapter_tracer import measure_tracer
from bench.gateway_attacks import measure_attacks
from bench.gateway_calls import measure_added_time, measure_in_flight, measure_rate, measure_streams
from bench.parts import Part, options_of, run_parts

PARTS: dict[str, Part] = {
    "time": lambda options: measure_added_time(options.quick),
    "in_flight": lambda options: measure_in_flight(options.quick),
    "rate": lambda options: measure_rate(options.quick),
    "streams": lambda options: measure_streams(options.quick),
    "attacks": lambda options: measure_attacks(options.quick),
    "adapter": lambda options: measure_adapters(options.quick),
    "tracer": lambda options: measure_tracer(options.quick),
}


if __name__ == "__main__":
    sys.exit(run_parts(options_of(__doc__, PARTS), PARTS))
