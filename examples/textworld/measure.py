"""Measure how well a model solves games of TextWorld, made from seeds."""

from __future__ import annotations

import argparse
from pathlib import Path

from games import adventurer, make_games

import agentlightning as agl


def main() -> None:
    """Make the games, run them and print a line for each kind of goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True, help="base URL of an OpenAI-compatible server")
    parser.add_argument("--model", required=True, help="name of the model on the server")
    parser.add_argument("--api-key", default=None, help="key of the server")
    parser.add_argument("--games", type=int, default=10, help="number of games of each kind of goal")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first game; the others follow")
    parser.add_argument("--turns", type=int, default=30, help="maximum number of turns of a game")
    parser.add_argument("--folder", type=Path, default=Path("runs/textworld"), help="folder of the games")
    parser.add_argument("goals", nargs="*", default=["detailed", "brief", "none"], help="kinds of goal")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.games)
    tasks = [
        task for goal in options.goals for task in make_games(options.folder, seeds, goal=goal, turns=options.turns)
    ]
    llm = agl.LLM(endpoint=options.endpoint, model=options.model, api_key=options.api_key)
    trainer = agl.Trainer(strategy="shm", runner={"concurrency": 8}, initial_resources={"llm": llm})
    print(trainer.evaluate(adventurer, tasks, slices="goal"))


if __name__ == "__main__":
    main()
