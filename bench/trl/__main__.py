"""Prints processor seconds and held-out accuracy of both sides, seed by seed in turn.

make bench-trl ARGS="--seeds 5 --steps 24"
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile

from agentlightning.demo.imitation import make_policy
from bench.trl.shared import GROUP, STEPS, TASKS, Run, tasks_of_demo


def run(side: str, folder: str, seed: int, steps: int) -> Run:
    """Run one side in a separate process."""
    command = [sys.executable, "-m", f"bench.trl.{side}", folder, str(seed), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Make the first model, run all seeds, print the results."""
    parser = argparse.ArgumentParser(prog="bench.trl")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--model", help="folder of a model that the demo has warmed up; made anew without")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = options.model or made
        if not options.model:
            train_tasks, held_out = tasks_of_demo()
            make_policy(folder, [*train_tasks, *held_out])
        print(f"{options.steps} steps of {TASKS} tasks x {GROUP} rollouts, 2 updates each; CPU seconds of the training")
        print(f"{'seed':>4}  {'side':6}  {'CPU s':>6}  {'held-out before':>15}  {'after':>6}  last 4 steps' reward")
        runs: list[Run] = []
        for seed in range(options.seeds):
            for side in ("ours", "theirs") if seed % 2 == 0 else ("theirs", "ours"):
                result = run(side, folder, seed, options.steps)
                runs.append(result)
                last = statistics.mean(result.curve[-4:])
                print(
                    f"{seed:4}  {side:6}  {result.cpu_seconds:6.1f}  {result.held_out_before:15.3f}  "
                    f"{result.held_out:6.3f}  {last:.3f}",
                    flush=True,
                )
    seconds = {s: statistics.median(r.cpu_seconds for r in runs if r.side == s) for s in ("ours", "theirs")}
    accuracy = {s: statistics.mean(r.held_out for r in runs if r.side == s) for s in ("ours", "theirs")}
    print(f"median CPU seconds: ours {seconds['ours']:.1f}, theirs {seconds['theirs']:.1f}: ", end="")
    print(f"{seconds['theirs'] / seconds['ours']:.2f} times; mean held-out accuracy ", end="")
    print(f"{accuracy['ours']:.3f} and {accuracy['theirs']:.3f}")


if __name__ == "__main__":
    main()
