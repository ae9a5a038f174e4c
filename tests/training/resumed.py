"""A program that trains under one name, and that kills its whole process group where it is told to.

`python -m tests.training.resumed MODEL FOLDER [POINT]`; a point is a place and a step, such as `update 2`. With
`MAX_STALENESS=1` in the environment it collects asynchronously, with `ALGORITHM=PPO` it trains by PPO, and with
`DEVICE=cuda` on a GPU.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.training import collector
from agentlightning.training.checkpoint import CheckpointFolder
from agentlightning.training.held_out import HeldOut
from agentlightning.training.learner.policy import Policy
from agentlightning.training.policies import PolicyUpdater
from agentlightning.training.recording import RunRecorder
from agentlightning.training.run_folder import RunFolder
from agentlightning.types import AttemptedRollout
from tests.algorithm.parts import SMALL, two_turns

RUN_ID = "killed again and again"
STEPS = 6


@agl.rollout
def all_differ(task: str, llm: agl.LLM, rollout: AttemptedRollout) -> float:
    """The agent with rewards of which no two are equal, so that every step has an update."""
    return two_turns(task, llm) + rollout.start_time % 1


def kill() -> None:
    """End this process and every one that it has started, at once."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


def kill_at(point: str) -> None:
    """Let the program kill itself at a point."""
    place, _, number = point.partition(" ")
    step = int(number or 0)

    def after(owner: Any, name: str, step_of: Callable[..., int]) -> None:
        real = getattr(owner, name)

        @functools.wraps(real)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            if step_of(*args, **kwargs) == step:
                kill()
            return result

        @functools.wraps(real)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            result = await real(*args, **kwargs)
            if step_of(*args, **kwargs) == step:
                kill()
            return result

        setattr(owner, name, awaited if asyncio.iscoroutinefunction(real) else wrapped)

    def during(owner: Any, name: str, step_of: Callable[..., int]) -> None:
        real = getattr(owner, name)

        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            if step_of(*args, **kwargs) != step:
                return await real(*args, **kwargs)
            asyncio.get_running_loop().call_later(0.15, kill)
            await real(*args, **kwargs)
            kill()  # it was faster than that: what comes after it must not begin

        setattr(owner, name, wrapped)

    if place == "rollouts":
        during(collector, "collect", lambda store, requests, **_: requests[0].metadata["step"])
    elif place == "evaluation":
        during(HeldOut, "evaluate", lambda held_out, number, *_: number)
    elif place == "update":
        after(PolicyUpdater, "update_weights", lambda updater, number, rows: number)
    elif place == "ledger":
        after(RunRecorder, "ledger", lambda recorder, ledger, *_: ledger.step)
    elif place == "metrics":
        after(RunFolder, "append_metrics", lambda folder, figures: figures["step"])
    elif place == "record":
        after(RunRecorder, "step", lambda recorder, figures: figures.step)
    elif place == "files":
        after(PolicyUpdater, "save_checkpoint", lambda updater, folder, number: number)
    elif place == "checkpoint":
        after(CheckpointFolder, "write", lambda folder, number, *_: number)
    elif place == "end":
        after(Policy, "save", lambda *_: 0)
    else:
        raise ValueError(f"there is no point {point!r}")


def main() -> None:
    model, folder = sys.argv[1], Path(sys.argv[2])
    if len(sys.argv) > 3:
        kill_at(sys.argv[3])
    ahead = int(os.environ.get("MAX_STALENESS", "0"))
    how = {"max_staleness": ahead} if ahead else {"deterministic": True}
    algorithm = agl.PPO if os.environ.get("ALGORITHM") == "PPO" else agl.GRPO
    settings = {"max_steps": STEPS, "save_steps": 2, "eval_steps": 3, "device": os.environ.get("DEVICE", "cpu"), **how}
    trainer = agl.Trainer(
        algorithm=algorithm(**{**SMALL, "model": model, "output_dir": folder / "run", **settings}),
        runner={"type": "agentlightning.LitAgentRunner", "concurrency": 4},
        store=agl.SQLiteLightningStore(folder / "store.db"),
        strategy={"type": "cs", "server_port": 0},
        n_runners=2,
        run_id=RUN_ID,
    )
    trainer.fit(
        all_differ if ahead else two_turns, train_dataset=["one", "two", "three", "four"], val_dataset=["five", "six"]
    )
    asyncio.run(trainer.store.close())


if __name__ == "__main__":
    main()
