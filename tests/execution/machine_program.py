"""One program for every machine of a run, as a user writes it; its environment sets its role.

`python -m tests.execution.machine_program` prints `rewards [...]` when the algorithm has its rollouts, and at the end
`<role> <result>`. `ALGORITHM=stays` runs every task and then never ends; `OUTAGE` and `N_RUNNERS` are settings; `SLOW`
is how many seconds a rollout takes; with a folder `MEET` it waits until two have begun there. Each prints `running` at
its start.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.execution import exit_code_of
from agentlightning.store import LightningStore
from agentlightning.types import Dataset


@agl.rollout
def tenth(task: int) -> float:
    print("running", task, flush=True)
    time.sleep(float(os.environ.get("SLOW", "0")))
    if folder := os.environ.get("MEET"):
        (Path(folder) / str(task)).touch()
        while len(os.listdir(folder)) < 2:
            time.sleep(0.02)
    return task / 10


@agl.algo
async def runs_tasks(*, store: LightningStore, train_dataset: Dataset[int]) -> list[Any]:
    await store.add_resources({})
    rollouts = [await store.enqueue_rollout(train_dataset[i]) for i in range(len(train_dataset))]
    ids = [rollout.rollout_id for rollout in rollouts]
    done = await store.wait_for_rollouts(rollout_ids=ids, timeout=300)
    assert [rollout.status for rollout in done] == ["succeeded"] * len(ids), done
    rewards = [agl.find_final_reward(list(await store.query_spans(rollout_id))) for rollout_id in ids]
    print("rewards", rewards, flush=True)
    return rewards


@agl.algo
async def stays(*, store: LightningStore, train_dataset: Dataset[int]) -> None:
    await runs_tasks(store=store, train_dataset=train_dataset)
    await asyncio.Event().wait()


def main() -> None:
    trainer = agl.Trainer(
        algorithm={"ends": runs_tasks, "stays": stays}[os.environ.get("ALGORITHM", "ends")],
        n_runners=int(os.environ.get("N_RUNNERS", "2")),
        runner={"store_unreachable_timeout": float(os.environ.get("OUTAGE", "60"))},
        strategy={"type": "cs", "graceful_timeout": 5.0},
    )
    try:
        trainer.fit(tenth, train_dataset=[1, 2, 3])
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(exit_code_of(error))
    print(getattr(trainer.strategy, "role", None), trainer.result, flush=True)


if __name__ == "__main__":
    main()
