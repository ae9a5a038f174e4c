"""Measure how well a model solves tasks of verifiers, whose rollouts run in an environment of their own."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import agentlightning as agl


def verifiers_agent(python: str = sys.executable) -> agl.CommandAgent:
    """Return the agent that runs each task with a Python that has verifiers."""
    worker = Path(__file__).resolve().with_name("worker.py")
    return agl.CommandAgent([python, worker], env={"PYTHONPATH": str(worker.parent)}, timeout_seconds=600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", required=True, help="base URL of an OpenAI-compatible server")
    parser.add_argument("--model", required=True, help="name of the model on the server")
    parser.add_argument("--api-key", default=None, help="key of the server")
    parser.add_argument("--tasks", type=int, default=20, help="number of tasks")
    parser.add_argument("--taskset", default="sums", help="id of the taskset")
    parser.add_argument("--harness", default="sums", help="id of the harness")
    options = parser.parse_args()
    tasks = [{"taskset": options.taskset, "harness": options.harness, "index": i} for i in range(options.tasks)]
    llm = agl.LLM(endpoint=options.endpoint, model=options.model, api_key=options.api_key)
    trainer = agl.Trainer(strategy="shm", runner={"concurrency": 2}, initial_resources={"llm": llm})
    print(trainer.evaluate(verifiers_agent(), tasks, slices="taskset"))


if __name__ == "__main__":
    main()
