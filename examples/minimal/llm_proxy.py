"""Record the tokens of a plain OpenAI client's model calls with the gateway; training needs them.

    python examples/minimal/llm_proxy.py

Each attempt calls the gateway at its own address, `/rollout/<id>/attempt/<id>`. The model is the untrained one of the
demo, which needs no download and no key. Its replies are random tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import openai

import agentlightning as agl
from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.demo.model import make_model, make_tokenizer
from agentlightning.engine.engine import InferenceEngine
from agentlightning.training.learner.policy import Policy


@agl.rollout
def asks_twice(task: str, llm: agl.LLM) -> float:
    """Ask two questions. The agent only knows an address and a model, nothing about training."""
    with openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key or "unused") as client:
        for question in (task, "Add 3 and 4."):
            client.chat.completions.create(
                model=llm.model, messages=[{"role": "user", "content": question}], max_completion_tokens=5, seed=1
            )
    return 1.0


@contextmanager
def model_server() -> Generator[str]:
    """Serve an untrained model; yield its address."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer()
        Policy(make_model(tokenizer), tokenizer).save(Path(folder))
        engine = InferenceEngine(Policy.load(folder), model_name="tiny")
        engine.start()
        try:
            yield engine.base_url
        finally:
            engine.stop()


@agl.algo(auto_start_proxy=True)  # the gateway runs during this function
async def one_pass(*, store: agl.LightningStore, llm_proxy: agl.LLMProxy, train_dataset: list[str]) -> None:
    await store.add_resources({"llm": llm_proxy.as_resource()})
    rollouts = [await store.enqueue_rollout(task, mode="train") for task in train_dataset]
    await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in rollouts], timeout=60)
    for rollout in rollouts:
        for triplet in TracerTraceToTriplet().adapt(await store.query_spans(rollout.rollout_id)):
            print("prompt tokens    ", triplet.prompt["token_ids"])
            print("response tokens  ", triplet.response["token_ids"])
            print("log-probabilities", [round(value, 2) for value in triplet.response["token_logprobs"]])
            print("reward           ", triplet.reward)


def main() -> None:
    with model_server() as address:
        model: agl.ModelConfig = {
            "model_name": "tiny",
            "litellm_params": {"model": "hosted_vllm/tiny", "api_base": address},
        }
        trainer = agl.Trainer(algorithm=one_pass, llm_proxy=agl.LLMProxy(model_list=[model]), strategy="shm")
        trainer.fit(asks_twice, train_dataset=["What is 34 plus 5?"])


if __name__ == "__main__":
    main()
