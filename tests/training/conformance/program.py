"""A program that trains under one name, and that kills its whole process group where it is told to.

`python -m tests.training.conformance.program ALGORITHM MODEL FOLDER [POINT]`; a point is a place and what is there:
`rollout 1` and `evaluation 2` (a step), `before ledger 1` and `after step 2` (a record of a step), `rename
checkpoint-2` (before it has its name), `write model` (between the files of the model), `runner 2` (in a step, and the
runner alone, once). With `DEVICE=cuda` it trains on a GPU.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import agentlightning as agl
from tests.training.conformance.cases import ALL, CURRICULUM, ManyEnds, StoppingStore, fit_whole


def kill() -> None:
    """End this process and every one that it has started, at once."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


class KilledInRollout(ManyEnds):
    """Kills the run, or its own runner once, while rollouts of a step are in progress."""

    def __init__(self, roles: Any, point: tuple[str, int]) -> None:
        super().__init__(roles)
        self._point = point

    def rollout(self, task: Any, resources: Any, rollout: Any) -> Any:
        earned, place = super().rollout(task, resources, rollout), rollout.metadata or {}
        kind = self._point[0] if (rollout.mode == "val") == (self._point[0] == "evaluation") else ""
        is_last = (place["task"], place.get("sample")) == (3, 3) if rollout.mode == "train" else place["task"] == 1
        if (kind, place["step"]) == self._point and is_last:  # all others were claimed by then
            if kind != "runner":
                kill()
            dead = Path(os.environ["LAST_WORDS"])
            if not dead.exists():
                dead.write_text(f"{rollout.rollout_id} {rollout.attempt.attempt_id}")
                os.kill(os.getpid(), signal.SIGKILL)
        return earned


def kill_at_file(verb: str, name: str) -> None:
    """Let the process kill itself before a folder has its name, or while files are written into it."""

    def on_event(event: str, arguments: Any) -> None:
        if event == "os.rename" and verb == "rename" and Path(os.fsdecode(arguments[1])).name == name:
            kill()
        if event == "open" and verb == "write" and isinstance(arguments[0], str):
            path, mode = Path(arguments[0]), arguments[1] or ""
            if path.parent.name == name and path.name == "tokenizer_config.json" and "w" in mode:
                kill()

    sys.addaudithook(on_event)


def main() -> None:
    name, model, folder, *points = sys.argv[1:]
    case = next(case for case in (*ALL, CURRICULUM) if case.name == name)
    point = points[0].split() if points else [""]
    place = Path(folder)
    settings: dict[str, Any] = {"trainer_store": agl.SQLiteLightningStore(place / "store.db")}
    agent: Any = ManyEnds(case.roles)
    if point[0] in ("rollout", "evaluation", "runner"):
        agent = KilledInRollout(case.roles, (point[0], int(point[1])))
    elif point[0] in ("rename", "write"):
        kill_at_file(*point)
    elif point[0]:
        settings["trainer_store"] = StoppingStore(place / "store.db", points[0], kill)
    if case.package == "torch":  # with runners in processes of their own
        runner = {"type": "agentlightning.LitAgentRunner", "concurrency": 4}
        settings |= {"trainer_runner": runner, "trainer_strategy": {"type": "cs", "server_port": 0}}
        settings |= {"trainer_n_runners": 2, "device": os.environ.get("DEVICE", "cpu")}
    if point[0] == "runner":
        quick = {"lease_seconds": 2.0, "scan_debounce_seconds": 0.1}
        settings["trainer_store"] = agl.SQLiteLightningStore(place / "store.db", **quick)
        settings["trainer_runner"] |= {"heartbeat_interval": 0.2, "interval_jitter": 0.0, "concurrency": 1}
    fit_whole(case, Path(model), place, agent=agent, **settings)
    asyncio.run(settings["trainer_store"].close())


if __name__ == "__main__":
    main()
