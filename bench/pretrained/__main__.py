"""A pretrained model learns by reward, on a CPU: SmolLM2-135M-Instruct with LoRA, through the whole path.

make bench-pretrained ARGS="--seeds 1"

Targets, each seed: 20 points more on the 120 held-out items than before, p below 0.01, within 15 minutes on two quiet
cores. Exit 0 only on target.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import agentlightning as agl
from agentlightning.training.result import GRPOResult
from bench.pretrained.control import format_only
from bench.pretrained.training import gained, train
from bench.pretrained.words import make_items
from bench.prompts.model import unpacked

MINUTES = 15.0


def report(seed: int, result: GRPOResult, minutes: float, cpu_minutes: float) -> bool:
    """Print the figures of one seed; return whether they are on target."""
    good, _ = (gained(result, sampling, f"seed {seed}") for sampling in ("sampled", "greedy"))
    good &= minutes <= MINUTES
    print(f"seed {seed}: {minutes:.1f} minutes, {cpu_minutes:.1f} CPU minutes; on target: {good}", flush=True)
    return good


def main() -> int:
    """Run the selected seeds."""
    parser = argparse.ArgumentParser(prog="bench.pretrained")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, from 0")
    parser.add_argument("--data", type=Path, default=Path("build/prompts"), help="folder of the unpacked wheel")
    parser.add_argument("--device", default="cpu", help="on which GRPO trains; the control is on the CPU")
    options = parser.parse_args()
    agl.setup_logging("ERROR")
    model, good = unpacked(options.data, options.data / "model"), True
    for seed in range(options.seeds):
        train_items, held_out = make_items(seed)
        if seed == 0:
            commonest = Counter(item["answer"] for item in held_out).most_common(1)[0][1]
            print(f"{len(train_items)} prompts to train on, {len(held_out)} held out, of other words and another form")
            print(f"best constant answer: {commonest / len(held_out):.1%}", flush=True)
        began, cpu = time.monotonic(), time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            result = train(model, Path(folder) / "run", train_items, held_out, seed=seed, device=options.device)
        good &= report(seed, result, (time.monotonic() - began) / 60, (time.process_time() - cpu) / 60)
        sampled, greedy = format_only(model, train_items, held_out, seed=seed)
        print(f"seed {seed}, format-only control: {sampled:.1%} sampled, {greedy:.1%} greedy", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
