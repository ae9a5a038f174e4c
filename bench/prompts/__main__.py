"""Searches for prompts, seed by seed, and prints the held-out reward of each. Exit 0 only on target.

make bench-prompts ARGS="--only rooms --seeds 3"

Targets, each seed: naming languages, from the worst of the starting prompts to within 5 points of the best known one;
selecting rooms, to 0.72 or more.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import agentlightning as agl
from bench.prompts import rooms
from bench.prompts.agent import names_language
from bench.prompts.languages import read_items
from bench.prompts.model import served, unpacked
from bench.prompts.prompts import BEST_KNOWN, STARTING
from bench.prompts.search import RANDOM_BUDGET, Bench, Found, Method

MARGIN, ROOMS_TARGET = 0.05, 0.72
RANDOM = "random"
_HEAD = f"{'':22}  seed  held-out  validation  rollouts  critic calls  seconds"


def row(name: str, seed: int, accuracy: float, result: Found) -> str:
    """Return one line of the table."""
    return (
        f"{name:22}  {seed:4}  {accuracy:8.3f}  {result.score:10.3f}  {result.rollouts:8}  {result.model_calls:12}  "
        f"{result.seconds:7.0f}"
    )


def room_selector(methods: Sequence[Method], seeds: Sequence[int]) -> bool:
    """Search with the agent that follows rules; return whether every seed reached the target."""
    train, validation, held_out = rooms.make_tasks()
    bench, good = Bench(rooms.selects_room, train, validation), True
    print(f"room selector, an agent that follows rules; {len(held_out)} held-out requests")
    print(f"{'starting prompt':22}  {'':4}  {bench.accuracy(rooms.SEED, held_out):8.3f}\n{_HEAD}")
    for method in methods:
        for seed in seeds:
            result = bench.search(method, rooms.SEED, seed, **rooms.SETTINGS[method])
            accuracy = bench.accuracy(result.template, held_out)
            print(row(method, seed, accuracy, result), flush=True)
            good &= accuracy >= ROOMS_TARGET
    return good


def languages(methods: Sequence[Method], seeds: Sequence[int], drawn: bool, data: Path) -> bool:
    """Search with SmolLM2; return whether every seed came within the margin of the best known prompt.

    `drawn` adds the random search: with as many rollouts as the other searches of its seed, else
    `RANDOM_BUDGET`.
    """
    items = read_items(data)
    held_out, good = items.held_out, True
    constant = Counter(item["language"] for item in held_out).most_common(1)[0][1] / len(held_out)
    print(f"languages, SmolLM2-135M-Instruct; {len(held_out)} held-out texts, {len(items.validation)} of validation")
    with served(unpacked(data, data / "model")) as gateway:
        bench = Bench(names_language, items.train, items.validation, gateway)
        print(f"{'constant answer':22}  {'':4}  {constant:8.3f}")
        starts = [(bench.accuracy(prompt, held_out), prompt) for prompt in STARTING]
        for accuracy, prompt in starts:
            print(f"{'starting prompt':22}  {'':4}  {accuracy:8.3f}  {prompt!r}", flush=True)
        best = bench.accuracy(BEST_KNOWN, held_out)
        print(f"{'best known prompt':22}  {'':4}  {best:8.3f}\n{_HEAD}", flush=True)
        worst = min(starts)[1]
        rollouts = dict.fromkeys(seeds, 0)
        for method in methods:
            for seed in seeds:
                result = bench.search(method, worst, seed)
                accuracy = bench.accuracy(result.template, held_out)
                print(row(method, seed, accuracy, result), flush=True)
                good &= accuracy >= best - MARGIN
                rollouts[seed] = max(rollouts[seed], result.rollouts)
        for seed in seeds if drawn else ():
            result = bench.random_search(worst, seed, rollouts[seed] or RANDOM_BUDGET)
            print(row("random search", seed, bench.accuracy(result.template, held_out), result), flush=True)
    return good


def main() -> int:
    """Run the selected parts."""
    parser = argparse.ArgumentParser(prog="bench.prompts")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them")
    parser.add_argument("--only", choices=["rooms", "languages"], action="append")
    parser.add_argument("--method", choices=[*get_args(Method), RANDOM], action="append")
    parser.add_argument("--data", type=Path, default=Path("build/prompts"), help="folder of the two unpacked wheels")
    options = parser.parse_args()
    agl.setup_logging("ERROR")
    seeds, good = range(options.first_seed, options.first_seed + options.seeds), True
    methods: Sequence[Method] = [each for each in options.method or get_args(Method) if each != RANDOM]
    drawn = options.method is None or RANDOM in options.method
    only = options.only or ["rooms", "languages"]
    if "rooms" in only:
        good &= room_selector(methods, seeds)
    if "languages" in only:
        good &= languages(methods, seeds, drawn, options.data)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
