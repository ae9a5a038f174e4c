"""Run one rollout of an environment of verifiers: the program that the agent starts for each task.

It reads the task, such as `{"taskset": "sums", "harness": "sums", "index": 3}`, from the standard input. The variables
OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL describe the model. The last line of its output is the reward.
"""
# pyright: basic, reportMissingImports=false
# The package is in a separate environment (constraints.txt), where its types are known.

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment


def model() -> vf.ModelContext:
    """Return the model of this attempt, with the sampling parameters that the algorithm sets."""
    resources = json.loads(Path(os.environ["AGL_RESOURCES_FILE"]).read_text()).values()
    parameters = next((each["sampling_parameters"] for each in resources if "sampling_parameters" in each), {})
    return vf.ModelContext(
        model=os.environ["OPENAI_MODEL"],
        client=vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"),
        sampling=vf.Sampling.model_validate(parameters),
    )


async def run(task: dict[str, Any]) -> float:
    """Run the task and return its reward. A failed model call raises RuntimeError, so that the attempt fails."""
    agent = {"harness": {"id": task["harness"]}, "runtime": {"type": "subprocess"}}
    settings = {"taskset": {"id": task["taskset"]}, "agent": agent}
    environment = load_environment(vf.SingleAgentEnvConfig.model_validate(settings))
    one = next(iter(environment.taskset.include(idx=[str(task["index"])])))
    async with environment.serving():
        [slot] = environment.slots(one)
        [trace] = (await environment.run_slot(slot, model())).traces
    if trace.errors:
        raise RuntimeError(f"task {task}: {trace.errors[-1]}")
    return float(trace.reward)


if __name__ == "__main__":
    print(json.dumps({"reward": asyncio.run(run(json.load(sys.stdin)))}))
