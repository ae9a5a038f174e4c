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


class Own(agl.Algorithm[int]):
    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> int:
        store = self.get_store()
        reveal_type(store)  # R: LightningStore
        return 1


trainer = agl.Trainer(algorithm=search)
agl.Trainer(algorithm=Own(), n_runners=2, store=agl.InMemoryLightningStore())
agl.Trainer(algorithm=agl.GRPO(model="model", max_steps=20, learning_rate=1e-5, loss_type="dr_grpo"))
agl.Trainer(algorithm=agl.PPO(model="model", max_steps=2))
agl.Trainer(algorithm=agl.SFT(model="model", max_steps=2))
agl.Trainer(algorithm=agl.Baseline(), initial_resources={"prompt": agl.PromptTemplate(template="x", engine="jinja")})
agl.GRPO(model="model", max_stepps=20)  # E
agl.GRPO(model="model", loss_type="grpoo")  # E
agl.GRPO(model="model", max_steps="many")  # E
agl.GRPO(model="model", scale_rewards="groups")  # E
agl.PPO(model="model", gae_lambda="1")  # E
agl.SFT(model="model", min_rewards=1.0)  # E
agl.Tinker(model="Qwen/Qwen3-8B", max_steps=20, learning_rate=1e-4, rank=16)
agl.Tinker(model="Qwen/Qwen3-8B", learning_rate="1e-4")  # E
agl.APO(beam_rounds=2)
agl.GEPA(max_metric_calls=20)
agl.APO(beam_round=2)  # E
agl.Trainer(n_runner=2)  # E
reveal_type(trainer.result)  # R: str
reveal_type(agl.Trainer(algorithm=agl.GRPO(model="model")).result)  # R: GRPOResult
reveal_type(agl.Trainer(algorithm=agl.GRPO(model="model")).result.model_path)  # R:
reveal_type(agl.Trainer(algorithm=agl.SFT(model="model", min_reward=1.0)).result)  # R: GRPOResult
reveal_type(agl.Trainer(algorithm=agl.VERL({})).result)  # R: GRPOResult
reveal_type(agl.Trainer(algorithm=agl.TRL("model")).result)  # R: GRPOResult
reveal_type(agl.Trainer(algorithm=agl.APO()).result)  # R: PromptResult
reveal_type(agl.Trainer(algorithm=agl.Baseline()).result)  # R: BaselineResult
reveal_type(agl.Trainer(algorithm=Own()).result)  # R: int
reveal_type(agl.Trainer().result)  # R: Any


@agl.algo(auto_start_proxy=True)
async def measure(*, llm_proxy: agl.LLMProxy) -> int:
    return 1


@agl.algo
def at_once(*, train_dataset: agl.Dataset[str]) -> float:
    return float(len(train_dataset))


async def directly(store: agl.LightningStore) -> None:
    reveal_type(await search(store=store, train_dataset=["a"]))  # R: str
    reveal_type(at_once(train_dataset=["a"]))  # R: float


def score(task: str) -> float:
    return 1.0


reveal_type(agl.Trainer(algorithm=measure).result)  # R: int
reveal_type(agl.Trainer(algorithm=at_once).result)  # R: float
reveal_type(agl.Trainer().evaluate(score, ["a"]))  # R: EvaluationResult
reveal_type(agl.GRPO(model="model").settings.learning_rate)  # R: float
