"""A run whose store is in Redis: `python examples/own_store/train.py redis://localhost:6379`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from redis_store import RedisLightningStore

import agentlightning as agl


class RedisTrainer(agl.Trainer):
    """Makes its own store. `agl.Trainer(store=RedisLightningStore(...))` does the same without a class."""

    url = "redis://localhost:6379"

    def _make_store(self, store: Any, strategy: agl.ExecutionStrategy) -> agl.LightningStore:
        return RedisLightningStore(url=self.url, thread_safe=False)


@agl.rollout
def greeter(task: str, prompt: agl.PromptTemplate) -> float:
    return 1.0 if prompt.format(name=task) == f"Hello, {task}!" else 0.0


async def show(store: agl.LightningStore) -> None:
    """Print the run's data in Redis."""
    for rollout in await store.query_rollouts():
        [attempt] = await store.query_attempts(rollout.rollout_id)
        spans = await store.query_spans(rollout.rollout_id)
        print(f"{rollout.input:6} {rollout.status}, attempt {attempt.sequence_id}, {len(spans)} span,", end=" ")
        print("reward", agl.find_final_reward(spans))
    await store.close()


def main() -> None:
    if len(sys.argv) > 1:
        RedisTrainer.url = sys.argv[1]
    prompt = agl.PromptTemplate(template="Hello, {name}!", engine="f-string")
    trainer = RedisTrainer(algorithm="baseline", n_runners=2, initial_resources={"prompt": prompt})
    trainer.fit(greeter, train_dataset=["Ada", "Grace", "Alan"])
    asyncio.run(show(RedisLightningStore(RedisTrainer.url)))


if __name__ == "__main__":
    main()
