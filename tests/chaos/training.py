"""A training run against a store elsewhere, to be disturbed from outside: `python -m tests.chaos.training ENDPOINT`.

Runs rounds of rollouts as algorithms do (publish, enqueue, wait, read the rewards) and prints what it saw as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import agentlightning as agl
from agentlightning.store import LightningStore
from agentlightning.types import Dataset, PromptTemplate

ROUNDS, EACH = 5, 12


@agl.rollout
async def agent(task: int) -> float:
    """An agent with two annotations and a reward."""
    agl.emit_annotation({"step": 1})
    await asyncio.sleep(0.01)
    agl.emit_annotation({"step": 2})
    return task / 10


@agl.algo
async def rounds(*, store: LightningStore, train_dataset: Dataset[int]) -> list[Any]:
    """Publish, enqueue a round, wait for it, read it; returns [task, status, attempts, rewards, version] of each."""
    rows: list[Any] = []
    for number in range(ROUNDS):
        update = await store.update_resources("policy", {"p": PromptTemplate(template=str(number), engine="f-string")})
        tasks = [train_dataset[i] for i in range(number * EACH, (number + 1) * EACH)]
        rollouts = [await store.enqueue_rollout(task, resources_id="policy") for task in tasks]
        for rollout in await store.wait_for_rollouts(rollout_ids=[r.rollout_id for r in rollouts], timeout=60):
            spans = list(await store.query_spans(rollout.rollout_id))
            rewards = [agl.get_reward_value(span) for span in agl.find_reward_spans(spans)]
            attempts = (await store.query_attempts(rollout.rollout_id)).total
            rows.append([rollout.input, rollout.status, attempts, rewards, rollout.resources_version == update.version])
    return rows


def main() -> None:
    trainer = agl.Trainer(
        algorithm=rounds,
        store=agl.LightningStoreClient(sys.argv[1], deadline=60.0),
        strategy={"type": "cs", "managed_store": False},
        runner={"heartbeat_interval": 0.2},
        n_runners=2,
    )
    trainer.fit(agent, train_dataset=list(range(ROUNDS * EACH)))
    print(json.dumps(trainer.result))


if __name__ == "__main__":
    main()
