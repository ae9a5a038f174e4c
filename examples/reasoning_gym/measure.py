"""Measure how well a model solves data sets of reasoning-gym, to choose tasks of the right difficulty."""

from __future__ import annotations

import argparse

import agentlightning as agl
from agentlightning.environments import ReasoningGymAgent, reasoning_gym

DATA_SETS = ["chain_sum", "leg_counting", "letter_counting", "spell_backward"]


def main() -> None:
    """Run all tasks and print a line for each data set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True, help="base URL of an OpenAI-compatible server")
    parser.add_argument("--model", required=True, help="name of the model on the server")
    parser.add_argument("--api-key", default=None, help="key of the server")
    parser.add_argument("--tasks", type=int, default=20, help="number of tasks of each data set")
    parser.add_argument("--seed", type=int, default=0, help="seed of the tasks")
    parser.add_argument("data_sets", nargs="*", default=DATA_SETS, help="names of data sets")
    options = parser.parse_args()
    tasks = [task for name in options.data_sets for task in reasoning_gym(name, size=options.tasks, seed=options.seed)]
    trainer = agl.Trainer(
        strategy="shm",
        runner={"concurrency": 8},
        initial_resources={
            "llm": agl.LLM(endpoint=options.endpoint, model=options.model, api_key=options.api_key),
        },
    )
    print(trainer.evaluate(ReasoningGymAgent(), tasks, slices="dataset"))


if __name__ == "__main__":
    main()
