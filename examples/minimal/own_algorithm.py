"""A custom algorithm: hill climbing over one number. It publishes a value, runs tasks, reads rewards, and decides."""

from __future__ import annotations

import random
from statistics import fmean

import agentlightning as agl
from agentlightning.training.records import RunLog

TASKS = [{"distance": distance} for distance in (8.0, 9.0, 10.0, 11.0, 12.0)]


@agl.rollout
def thrower(task: dict[str, float], force: agl.CustomResource) -> float:
    """Throw a ball. The reward is higher the closer it lands to the goal, at most 1."""
    return 1.0 / (1.0 + abs(task["distance"] - force["newton"] / 2.0))


@agl.algo
async def climb(*, store: agl.LightningStore, run: RunLog, train_dataset: list[dict[str, float]]) -> float:
    draw, best, best_reward = random.Random(0), 4.0, 0.0
    for step in range(1, 17):
        force = best if step == 1 else best + draw.uniform(-6.0, 6.0)
        await store.add_resources({"force": agl.CustomResource(values={"newton": force})})
        rollouts = [await store.enqueue_rollout(task, mode="train") for task in train_dataset]
        ids = [rollout.rollout_id for rollout in rollouts]
        await store.wait_for_rollouts(rollout_ids=ids, timeout=60)
        rewards = [agl.find_final_reward(await store.query_spans(rollout_id)) for rollout_id in ids]
        reward = fmean(each for each in rewards if each is not None)
        if reward > best_reward:
            best, best_reward = force, reward
        await run.step(step, {"mean_reward": reward, "best": best_reward})
        print(f"step {step:2}  force {force:5.1f}  reward {reward:.2f}  best {best_reward:.2f}")
    return best


def main() -> None:
    trainer = agl.Trainer(algorithm=climb, n_runners=2)
    trainer.fit(thrower, train_dataset=TASKS)
    print(f"best force: {trainer.result:.1f}")


if __name__ == "__main__":
    main()
