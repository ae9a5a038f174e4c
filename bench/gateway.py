"""`make bench-gateway`: the figures of the gateway, the adapters and the tracer, with their targets and verdicts.

Everything is measured on this machine in one run: what the gateway adds is the difference to calls to the engine
itself, in turns. Three processes share the cores (callers, gateway, engine), so measure on a quiet machine. Exit 0 only
if every target is met.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from bench.adapter import measure_adapters
from bench.adapter_tracer import measure_tracer
from bench.gateway_calls import measure_added_time, measure_rate, measure_streams
from bench.store_figures import HEAD, QUIET_STEPS_PER_SECOND, Figure, MachineShare, steps_per_second, wait_for_quiet

PARTS: dict[str, Callable[[bool], list[Figure]]] = {
    "time": measure_added_time,
    "rate": measure_rate,
    "streams": measure_streams,
    "adapter": measure_adapters,
    "tracer": measure_tracer,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, with commas: {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="smaller and shorter, to try it out")
    parser.add_argument("--wait-quiet", type=float, default=0.0, help="seconds to wait for an idle machine, per part")
    options = parser.parse_args()
    chosen = [name.strip() for name in options.only.split(",")]
    if unknown := [name for name in chosen if name not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}; expected any of {', '.join(PARTS)}")
    missed: list[Figure] = []
    began = time.monotonic()
    print(HEAD)
    for name in chosen:
        wait_for_quiet(options.wait_quiet)
        share, speed = MachineShare(), steps_per_second()
        for figure in PARTS[name](options.quick):
            print(figure.line(), flush=True)
            missed += [figure] if figure.met is False else []
        print(
            f"({name}: others used {share.of_others():.0%} of the machine; "
            f"plain Python ran at {speed / QUIET_STEPS_PER_SECOND:.0%} of its speed on the reference machine)\n",
            flush=True,
        )
    print(f"{len(missed)} targets missed, {time.monotonic() - began:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
