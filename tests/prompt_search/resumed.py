"""A program that searches under one name, and that kills its whole process group where it is told to.

`python -m tests.prompt_search.resumed SERVER FOLDER STRATEGY [POINT]`; a point is a place and a number, such as
`record 3`: after the third version is written down.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.prompt_search import evaluator
from agentlightning.prompt_search.beam_search import BeamSearch
from agentlightning.prompt_search.history import History
from tests.prompt_search.parts import SMALL, TRAIN, VAL, heeds_rules, resources

RUN_ID = "killed again and again"


def kill_at(point: str) -> None:
    """Let the program kill itself, and every process that it has started, at a point."""
    place, _, number = point.partition(" ")
    remaining = [int(number)]

    def counted(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        @functools.wraps(real)
        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = await real(*args, **kwargs)
            remaining[0] -= 1
            if remaining[0] == 0:
                os.killpg(os.getpgrp(), signal.SIGKILL)
            return result

        setattr(owner, name, wrapped)

    owners = {
        "record": (History, "record"),
        "played": (evaluator, "collect"),
        "choice": (BeamSearch, "_select"),
        "round": (BeamSearch, "_record_round"),
    }
    counted(*owners[place])


def main() -> None:
    server, folder, strategy = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    if len(sys.argv) > 4:
        kill_at(sys.argv[4])
    store = agl.SQLiteLightningStore(folder / "store.db")
    algorithm: agl.APO[Any] = agl.APO(agl.LLM(endpoint=server, model="critic"), **SMALL, output_dir=folder)
    trainer = agl.Trainer(
        algorithm=algorithm,
        store=store,
        strategy={"type": "cs", "server_port": 0} if strategy == "cs" else "shm",
        n_runners=2,
        initial_resources=resources(),
        run_id=RUN_ID,
        progress="none",
    )
    print("begins", flush=True)
    try:
        trainer.fit(heeds_rules, train_dataset=TRAIN, val_dataset=VAL)
    except KeyboardInterrupt:
        print(json.dumps({"interrupted": algorithm.get_best_prompt().template}), flush=True)
        return
    result = trainer.result

    async def everything() -> int:
        count = len(await store.query_rollouts(limit=-1))
        await store.close()
        return count

    facts = {"best": result.best_prompt.template, "calls": result.bill.calls, "rollouts": asyncio.run(everything())}
    states = [[version.version, version.state, version.score] for version in result.history]
    print(
        json.dumps({**facts, "states": states, "same": algorithm.get_best_prompt() == result.best_prompt}), flush=True
    )


if __name__ == "__main__":
    main()
