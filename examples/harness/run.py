"""Run a harness on the tasks of this folder, and print which ones it solved."""

from __future__ import annotations

import argparse
from pathlib import Path

import agentlightning as agl

TASKS = Path(__file__).parent / "tasks"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("harness", help="Name of the harness in Harbor, such as mini-swe-agent.")
    parser.add_argument("--url", required=True, help="Address of an OpenAI-compatible server, ending in /v1.")
    parser.add_argument("--model", required=True, help="Name of the model on this server.")
    parser.add_argument("--tools", action="append", default=[], help="Folder with the harness; may be repeated.")
    parser.add_argument("--environment", default="bwrap", help="Sandbox: bwrap, docker, podman or another of Harbor.")
    options = parser.parse_args()

    server = {"model": f"hosted_vllm/{options.model}", "api_base": options.url}
    proxy = agl.LLMProxy(model_list=[{"model_name": options.model, "litellm_params": server}])
    trainer = agl.Trainer(
        algorithm=agl.Baseline(),
        llm_proxy=proxy,
        initial_resources={"main_llm": proxy.as_resource()},
        n_runners=1,
        runner={"concurrency": 2},
        strategy="shm",
    )
    tools = [Path(each).absolute() for each in options.tools]
    agent = agl.HarborAgent(options.harness, options.environment, tools=tools)
    tasks = sorted(path.parent for path in TASKS.glob("*/task.toml"))
    trainer.fit(agent, train_dataset=[str(task) for task in tasks])
    for task, reward in zip(tasks, trainer.result.rewards, strict=True):
        print(f"{task.name:<14}{'no verdict' if reward is None else 'solved' if reward == 1 else 'not solved'}")
    if trainer.result.first_error is not None:
        print(f"first error: {trainer.result.first_error}")


if __name__ == "__main__":
    main()
