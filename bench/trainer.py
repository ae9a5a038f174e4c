"""`make bench-trainer`: the figures of a run with their targets, and what the older system reached.

Everything is measured on this machine in one run, in wall time, so measure on a quiet machine. Exit 0 only if every
target is met.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.parts import Part, options_of, run_parts
from bench.trainer_fit import measure_fit, measure_growth
from bench.trainer_runner import measure_runner

PARTS: dict[str, Part] = {
    "fit": lambda options: measure_fit(options.quick),
    "runner": lambda options: measure_runner(options.quick),
    "growth": lambda options: measure_growth(options.quick, options.plot),
}


def main() -> int:
    parser = options_of(__doc__, PARTS)
    parser.add_argument("--plot", type=Path, help="file for the curves of `growth`, such as growth.svg")
    return run_parts(parser, PARTS)


if __name__ == "__main__":
    sys.exit(main())
