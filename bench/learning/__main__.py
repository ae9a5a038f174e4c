"""`make bench-learning`: the demo with several seeds, the game, two roles, and speed. Exit 0 only on target.

`--only async` compares synchronous with asynchronous collection, `--only curriculum` passes over the tasks with
`curriculum="solve_rate"`, which must help where most tasks teach nothing, and change nothing where all tasks are alike.
`--only credit` compares rewards of calls with the reward of the rollout alone, which must learn more slowly.

Targets of the demo, each seed: held-out accuracy sampled from below 40 % and greedily from below 30 % to 90 % or more,
better at p < 0.01; on two quiet cores a median of at most 60 s of training and of three minutes in all. Of the game:
0.8 of the best policy's expected reward. Of two roles with a policy each: 85 % from a start below 40 % in 120 s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.learning.asynchronous import AGENTS, compare_speed, learn, ratio_of
from bench.learning.credit import KINDS
from bench.learning.credit import compare as compare_credit
from bench.learning.curriculum import SETS, compare
from bench.learning.game import best_deaf_value, best_value, random_value
from bench.learning.game_run import train_player
from bench.learning.pairs import difference
from bench.learning.speed import measure_speed
from bench.learning.two_roles import train_two

_ONE = """
import dataclasses, json, sys
from pathlib import Path
from agentlightning.demo.run import DemoOptions, run_demo
outcome = run_demo(DemoOptions(seed=int(sys.argv[1]), out=Path(sys.argv[2]), progress="plain"), sys.stderr)
print(json.dumps(dataclasses.asdict(outcome), default=str))
"""


def one_seed(seed: int, folder: Path) -> dict[str, Any]:
    """Run the demo in a separate process and return its outcome, with the total seconds."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _ONE, str(seed), str(folder)], stdout=subprocess.PIPE, text=True, check=True
    )
    return {**json.loads(done.stdout.splitlines()[-1]), "seconds": time.monotonic() - began}


def row(seed: int, outcome: dict[str, Any]) -> str:
    """Return one line of the table."""
    return (
        f"{seed:>6}  {outcome['before']:>7.1%} {outcome['after']:>7.1%}  {outcome['greedy_before']:>7.1%} "
        f"{outcome['greedy_after']:>7.1%}  {outcome['p_value']:>9.1e}  {outcome['warm_start_seconds']:>6.1f} "
        f"{outcome['train_seconds']:>7.1f} {outcome['seconds']:>7.1f}"
    )


def learned(outcome: dict[str, Any]) -> bool:
    """Return whether a seed of the demo has reached its targets."""
    low = outcome["before"] < 0.4 and outcome["greedy_before"] < 0.3
    high = outcome["after"] >= 0.9 and outcome["greedy_after"] >= 0.9
    return low and high and outcome["better"] and outcome["p_value"] < 0.01


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds, from 0")
    parser.add_argument(
        "--only", choices=["demo", "game", "roles", "speed", "async", "curriculum", "credit"], action="append"
    )
    options = parser.parse_args()
    only, seeds = options.only or ["demo", "game", "roles", "speed"], range(options.seeds)
    good = True
    if "demo" in only:
        with tempfile.TemporaryDirectory() as folder:
            outcomes = [one_seed(seed, Path(folder) / str(seed)) for seed in seeds]
        print("  seed   sampled before/after  greedy before/after    p      warm s  train s   all s")
        for seed, outcome in zip(seeds, outcomes, strict=True):
            print(row(seed, outcome))
        train, whole = (statistics.median(o[name] for o in outcomes) for name in ("train_seconds", "seconds"))
        print(f"median training {train:.1f} s, whole {whole:.1f} s")
        good &= all(map(learned, outcomes)) and train <= 60 and whole <= 180
    if "game" in only:
        best = best_value()
        print(f"game: best {best:.3f}, best that hears nothing {best_deaf_value():.3f}, random {random_value():.3f}")
        for seed in seeds:
            with tempfile.TemporaryDirectory() as folder:
                before, after = train_player(Path(folder), seed)
            print(f"{seed:>6}  warm start {before:.3f}, trained {after:.3f}: {after / best:.2f} of the best")
            good &= after >= 0.8 * best
    if "roles" in only:
        print("two roles, a policy each: held-out accuracy before and after, seconds of training")
        for seed in seeds[:3]:
            with tempfile.TemporaryDirectory() as folder:
                two_roles = train_two(Path(folder), seed)
            print(f"{seed:>6}  {two_roles.before:.1%} {two_roles.after:.1%} {two_roles.seconds:.0f} s", flush=True)
            good &= two_roles.before < 0.4 and two_roles.after >= 0.85 and two_roles.seconds <= 120
    if "async" in only:
        for agent in AGENTS:
            pairs = compare_speed(agent)
            rates = ", ".join(f"{ahead:.1f}/{synchronous:.1f}" for synchronous, ahead in pairs)
            print(f"{agent}: {ratio_of(pairs):.2f} times the rollouts per second ({rates})", flush=True)
        for seed in seeds[:3]:
            synchronous, ahead = (learn(seed, staleness) for staleness in (0, 1))
            print(
                f"{seed:>6}  held out {synchronous.accuracy:.1%} synchronous, {ahead.accuracy:.1%} asynchronous "
                f"(mean staleness {ahead.staleness:.2f})",
                flush=True,
            )
            good &= ahead.accuracy >= 0.9
    if "curriculum" in only:
        for task_set in SETS:
            pairs = [compare(task_set, seed) for seed in seeds]
            for seed, pair in zip(seeds, pairs, strict=True):
                (plain, drawn), (few, many) = pair.value, pair.useful
                print(f"{seed:>6}  {task_set}: {plain:.3f} and {drawn:.3f}, groups with a signal {few} and {many}")
            change = difference([pair.value for pair in pairs])
            print(f"{task_set}: difference with the curriculum {change.text(signed=True)}", flush=True)
            good &= change.low > 0 if task_set == "mixed" else change.low <= 0 <= change.high
    if "credit" in only:
        for kind in KINDS:
            values = [compare_credit(kind, seed) for seed in seeds]
            each = ", ".join(f"{alone:.3f} and {with_calls:.3f}" for alone, with_calls in values)
            change = difference(values)
            print(f"{kind}: {each}; difference with rewards of calls {change.text(signed=True)}", flush=True)
            good &= change.low > 0
    if "speed" in only:
        speed = measure_speed()
        print(f"update: {speed.update_tokens:,.0f} tokens per CPU second")
        print(f"decode: {speed.decode_tokens:,.0f} tokens per CPU second")
        print(f"path: {speed.path_milliseconds:.2f} CPU ms per model call")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
