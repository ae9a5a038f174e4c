"""`make bench-learning`: the demo with several seeds in turn, as a table. Exit 0 only if the targets are met.

Targets: mean accuracy after at least 90 %, each seed at least 85 % and better at p < 0.01, median training time at most
90 s on two cores (warm start and final evaluation apart).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_ONE = """
import dataclasses, json, sys
from pathlib import Path
from agentlightning.demo.run import DemoOptions, run_demo
outcome = run_demo(DemoOptions(seed=int(sys.argv[1]), out=Path(sys.argv[2]), progress="plain"), sys.stderr)
print(json.dumps(dataclasses.asdict(outcome), default=str))
"""


def one_seed(seed: int, folder: Path) -> dict[str, Any]:
    """Run the demo in a process of its own and return its outcome."""
    done = subprocess.run(
        [sys.executable, "-c", _ONE, str(seed), str(folder)], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def row(seed: int | str, outcome: dict[str, Any]) -> str:
    """Return one line of the table."""
    return (
        f"{seed:>6}  {outcome['before']:>7.1%} {outcome['after']:>7.1%}  {outcome['greedy_before']:>7.1%} "
        f"{outcome['greedy_after']:>7.1%}  {outcome['p_value']:>9.1e}  {outcome['warm_start_seconds']:>6.1f} "
        f"{outcome['train_seconds']:>7.1f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds, from 0")
    seeds = range(parser.parse_args().seeds)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = [one_seed(seed, Path(folder) / str(seed)) for seed in seeds]
    print("  seed   before   after   greedy before/after      p     warm s  train s")
    for seed, outcome in zip(seeds, outcomes, strict=True):
        print(row(seed, outcome))
    mean = statistics.mean(o["after"] for o in outcomes)
    seconds = statistics.median(o["train_seconds"] for o in outcomes)
    print(f"mean after {mean:.1%}, median training {seconds:.1f} s")
    good = all(o["after"] >= 0.85 and o["p_value"] < 0.01 and o["better"] for o in outcomes)
    return 0 if good and mean >= 0.90 and seconds <= 90 else 1


if __name__ == "__main__":
    sys.exit(main())
