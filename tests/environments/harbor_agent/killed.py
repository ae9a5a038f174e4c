"""The agent and the algorithm of test_trials_killed.py, each for a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import agentlightning as agl
from agentlightning.environments.harbor import trial_folder
from tests.environments.harbor_agent.agents import ASK

if "HARBOR_TEST_FOLDER" in os.environ:
    trial_folder.BASE = Path(os.environ["HARBOR_TEST_FOLDER"])
SCRIPT = (
    f"set -e\n{ASK}\nif [ -e /app/solvable ]; then printf 'def mul(a, b):\\n    return a * b\\n' > /app/calc.py; fi"
)
RETRIED = agl.RolloutConfig(
    timeout_seconds=60, unresponsive_seconds=5, max_attempts=4, retry_condition=["failed", "timeout", "unresponsive"]
)


def make_agent() -> agl.HarborAgent:
    fields = {"import_path": "tests.environments.harbor_agent.agents:Script", "kwargs": {"script": SCRIPT}}
    return agl.HarborAgent(fields)


async def train(store_url: str, engine: str, port: int, tasks: list[dict[str, object]]) -> None:
    """Serve the model, enqueue the tasks that are not in the store, and wait for all."""
    store = agl.LightningStoreClient(store_url)
    model = {"model": "hosted_vllm/policy", "api_base": engine}
    proxy = agl.LLMProxy(port=port, model_list=[{"model_name": "policy", "litellm_params": model}], store=store)
    await proxy.start()
    await store.update_resources("default", {"main_llm": proxy.as_resource()})
    known = {rollout.input["number"]: rollout.rollout_id for rollout in await store.query_rollouts()}
    for task in tasks:
        if task["number"] not in known:
            enqueued = await store.enqueue_rollout(task, mode="train", config=RETRIED)
            known[task["number"]] = enqueued.rollout_id
    await store.wait_for_rollouts(rollout_ids=list(known.values()), timeout=1200)
    await proxy.stop()
    await store.close()


if __name__ == "__main__":
    url, engine, port, tasks = sys.argv[1:]
    asyncio.run(train(url, engine, int(port), json.loads(tasks)))
else:
    agent = make_agent() if "HARBOR_TEST_FOLDER" in os.environ else None
