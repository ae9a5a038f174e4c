"""A run with the tracer of `file_tracer.py`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from file_tracer import FileTracer

import agentlightning as agl


@agl.operation
def double(number: int) -> int:
    return 2 * number


@agl.rollout
def agent(task: int) -> float:
    agl.emit_message(f"{task} is to be doubled")
    return float(double(task) == 6)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spans.jsonl"
        trainer = agl.Trainer(tracer=FileTracer(path), n_runners=1)
        print(trainer.evaluate(agent, [2, 3]).rewards)
        print(path.read_text(), end="")


if __name__ == "__main__":
    main()
