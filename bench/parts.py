"""The shared code of the benches: choose parts, measure them one after the other, print figures with their verdicts."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping

from bench.store_figures import HEAD, QUIET_STEPS_PER_SECOND, Figure, MachineShare, steps_per_second, wait_for_quiet

Part = Callable[[argparse.Namespace], list[Figure]]


def options_of(description: str | None, parts: Mapping[str, Part]) -> argparse.ArgumentParser:
    """Return the parser of the options that every bench has: parts, duration, start."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(parts), help=f"parts, with commas: {','.join(parts)}")
    parser.add_argument("--quick", action="store_true", help="smaller and shorter, to try it out")
    parser.add_argument("--wait-quiet", type=float, default=0.0, help="seconds to wait for an idle machine, per part")
    return parser


def run_parts(parser: argparse.ArgumentParser, parts: Mapping[str, Part]) -> int:
    """Measure the chosen parts and return the exit code: 0 only if every target is met."""
    options = parser.parse_args()
    chosen = [name.strip() for name in options.only.split(",")]
    if unknown := [name for name in chosen if name not in parts]:
        parser.error(f"unknown part {unknown[0]!r}; expected any of {', '.join(parts)}")
    missed: list[Figure] = []
    began = time.monotonic()
    print(HEAD)
    for name in chosen:
        wait_for_quiet(options.wait_quiet)
        share, speed = MachineShare(), steps_per_second()
        for figure in parts[name](options):
            print(figure.line(), flush=True)
            missed += [figure] if figure.met is False else []
        print(
            f"({name}: others used {share.of_others():.0%} of the machine; "
            f"plain Python ran at {speed / QUIET_STEPS_PER_SECOND:.0%} of its speed on the reference machine)\n",
            flush=True,
        )
    print(f"{len(missed)} targets missed, {time.monotonic() - began:.0f} s")
    return 1 if missed else 0
