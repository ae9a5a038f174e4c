"""Algorithms of a user, and the settings of ours."""

from typing import Any

import agentlightning as agl


@agl.algo
async def search(*, store: agl.LightningStore, train_dataset: agl.Dataset[str]) -> str:
    update = await store.add_resources({"prompt": agl.PromptTemplate(template="Hello", engine="f-string")})
    reveal_type(update.resources_id)  # R: str
    rollout = await store.enqueue_rollout(input=train_dataset[0], mode="train", resources_id=update.resources_id)
    reveal_type(rollout)  # R: Rollout
    done = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=10.0)
    reveal_type(done)  # R: list[Rollout]
    spans = await store.query_spans(rollout.rollout_id)
    return agl.TraceToMessages().adapt(list(spans))[0].__class__.__name__


class Own(agl.Algorithm):
    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        store = self.get_store()
        reveal_type(store)  # R: LightningStore


trainer = agl.Trainer(algorithm=search)
agl.Trainer(algorithm=Own(), n_runners=2, store=agl.InMemoryLightningStore())
agl.Trainer(algorithm=agl.GRPO(model="model", max_steps=20, learning_rate=1e-5, loss_type="dr_grpo"))
agl.Trainer(algorithm=agl.PPO(model="model", max_steps=2))
agl.Trainer(algorithm=agl.SFT(model="model", max_steps=2))
agl.Trainer(algorithm=agl.Baseline(), initial_resources={"prompt": agl.PromptTemplate(template="x", engine="jinja")})
agl.GRPO(model="model", max_stepps=20)  # E
agl.GRPO(model="model", loss_type="grpoo")  # E
agl.GRPO(model="model", max_steps="many")  # E
agl.Trainer(n_runner=2)  # E
reveal_type(trainer.result)  # R: Any
reveal_type(agl.GRPO(model="model").settings.learning_rate)  # R: float
