"""A custom algorithm, a small search over prompts, and its runner: each in its own terminal, on one store.

    agl store
    python apo_custom_algorithm.py algo
    python apo_custom_algorithm.py runner

The algorithm publishes a prompt, runs the tasks with it, reads their rewards, and continues with the best prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from statistics import fmean
from typing import TypedDict

import openai
from stand_in import llm, model_server

import agentlightning as agl
from agentlightning.training.rollouts import collect, evidence


class Question(TypedDict):
    question: str
    answer: str


TASKS = [
    Question(question="What is 17 times 23?", answer="391"),
    Question(question="What is 41 plus 58?", answer="99"),
    Question(question="What is 90 minus 37?", answer="53"),
]
ENDINGS = ("Explain your answer.", "Answer with the number alone.")


@agl.rollout
def apo_rollout(task: Question, prompt_template: agl.PromptTemplate) -> float:
    """Ask the model. The reward is 1 for the correct answer alone, and lower the more other words the reply has."""
    model = llm("assistant")
    prompt = prompt_template.format(any_question=task["question"])
    with openai.OpenAI(base_url=model.endpoint, api_key=model.api_key or "unused") as client:
        reply = client.chat.completions.create(model=model.model, messages=[{"role": "user", "content": prompt}])
    words = (reply.choices[0].message.content or "").split()
    return float(task["answer"] in [word.strip(".,!*") for word in words]) / max(1, len(words))


async def mean_reward(prompt: str, store: agl.LightningStore) -> float:
    """Return the mean reward of the tasks with a prompt."""
    resources: agl.NamedResources = {
        "main_prompt": agl.PromptTemplate(template=prompt, engine="f-string")  # any name: the agent gets it by type
    }
    version = await store.add_resources(resources)
    requests = [agl.EnqueueRolloutRequest(input=task, resources_id=version.resources_id) for task in TASKS]
    rollouts = await collect(store, requests, timeout_seconds=600)
    rewards = [(await evidence(store, rollout)).reward for rollout in rollouts]
    if None in rewards:
        raise RuntimeError(
            f"{rewards.count(None)} of {len(TASKS)} rollouts have no reward. Check the output of the runner."
        )
    return fmean(reward for reward in rewards if reward is not None)


async def apo_algorithm(*, store: agl.LightningStore) -> str:
    """Return the best of three prompts and of its extensions by one sentence."""
    prompt_candidates = [
        "You are a helpful assistant. {any_question}",
        "You are a knowledgeable AI. {any_question}",
        "You are a friendly chatbot. {any_question}",
    ]
    prompt_and_rewards: list[tuple[str, float]] = []
    best = ""
    for _ in range(2):
        for prompt in prompt_candidates:
            print(f"[Algo] Updating prompt template to: '{prompt}'", flush=True)
            reward = await mean_reward(prompt, store)
            print(f"[Algo] Reward: {reward:.2f}", flush=True)
            prompt_and_rewards.append((prompt, reward))
        best, _ = max(prompt_and_rewards, key=lambda each: each[1])
        prompt_candidates = [f"{best} {ending}" for ending in ENDINGS]
    print(f"[Algo] Best prompt: '{best}'", flush=True)
    return best


async def apo_runner(*, store: agl.LightningStore) -> None:
    """Run rollouts of the store until Ctrl+C."""
    runner = agl.LitAgentRunner[Question](tracer=agl.OtelTracer())
    with model_server(), runner.run_context(agent=apo_rollout, store=store):
        print("[Runner] Waiting for rollouts. Press Ctrl+C to stop.", flush=True)
        await runner.iter()


async def run(role: str, address: str) -> None:
    store = agl.LightningStoreClient(address)
    try:
        await (apo_algorithm if role == "algo" else apo_runner)(store=store)
    finally:
        await store.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["algo", "runner"])
    parser.add_argument("--external-store-address", metavar="URL", default="http://127.0.0.1:4747")
    options = parser.parse_args()
    agl.setup_logging("WARNING")
    try:
        asyncio.run(run(options.role, options.external_store_address))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
