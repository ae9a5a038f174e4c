"""A program that is killed in the middle of its run, and started again. Run as a module: folder, then strategy."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import agentlightning as agl

TASKS = list(range(8))
FATAL = (2, 5)
"""The tasks in whose first attempt the whole program is killed."""


def main(folder: Path, strategy: Any) -> None:
    """Run every task once, with a note of each attempt; print the rewards."""
    program = os.getpid()

    def agent(task: int) -> float:
        with (folder / "attempts").open("a") as attempts:
            attempts.write(f"{task}\n")
        killed = folder / f"killed-{task}"
        if task in FATAL and not killed.exists():
            killed.touch()
            os.kill(program, signal.SIGKILL)
            signal.pause()  # a runner in a process of its own outlives the program by a moment
        return task / 10

    trainer = agl.Trainer(
        algorithm=agl.Baseline(max_queue_length=4),
        store=f"sqlite:///{folder}/run.db?lease_seconds=1",
        run_id="mine",
        strategy=strategy,
        runner={"heartbeat_interval": 0.2, "poll_interval": 0.2},
        initial_resources={},
    )
    trainer.fit(agent, train_dataset=TASKS)
    print(json.dumps(trainer.result.rewards))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
