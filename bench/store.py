"""`make bench-store`: the figures of the store with their targets, and what the older system reached.

Everything is measured on this machine in one run. Rates of one process are taken with a clock that leaves out the time
in which others had the core; all else is wall time, so measure on a quiet machine. Exit 0 only if every target is met.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from bench.store_durable import measure_durable
from bench.store_figures import HEAD, QUIET_STEPS_PER_SECOND, Figure, MachineShare, steps_per_second, wait_for_quiet
from bench.store_http import measure_http
from bench.store_memory import measure_memory
from bench.store_otlp import measure_otlp
from bench.store_waiting import measure_long_waits, measure_wake_ups

PARTS: dict[str, Callable[[bool], list[Figure]]] = {
    "memory": measure_memory,
    "http": measure_http,
    "durable": measure_durable,
    "otlp": measure_otlp,
    "wake": measure_wake_ups,
    "wait": measure_long_waits,
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
