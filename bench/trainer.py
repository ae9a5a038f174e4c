"""`make bench-trainer`: the figures of a run with their targets, and what the older system reached.

Everything is measured on this machine in one run, in wall time, so measure on a quiet machine. Exit 0 only if every
target is met.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.store_figures import HEAD, QUIET_STEPS_PER_SECOND, Figure, MachineShare, steps_per_second, wait_for_quiet
from bench.trainer_fit import measure_fit
from bench.trainer_growth import measure_growth
from bench.trainer_runner import measure_runner

PARTS: dict[str, Callable[[bool, Path | None], list[Figure]]] = {
    "fit": lambda quick, _: measure_fit(quick),
    "runner": lambda quick, _: measure_runner(quick),
    "growth": measure_growth,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, with commas: {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="smaller and shorter, to try it out")
    parser.add_argument("--wait-quiet", type=float, default=0.0, help="seconds to wait for an idle machine, per part")
    parser.add_argument("--plot", type=Path, help="file for the curves of `growth`, such as growth.svg")
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
        for figure in PARTS[name](options.quick, options.plot):
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
