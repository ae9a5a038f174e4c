"""One program for every recipe in this folder: the agent that the runners run, and the algorithm.

Start a runner with `agl runner train.py:agent`, and the algorithm with `python train.py` and the role `algorithm`.
Replace agent, tasks and algorithm with your own. The recipes use no other names of this file.
"""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any

import agentlightning as agl

TASKS = [{"question": f"What is {a} + {b}?", "answer": a + b} for a in range(2, 6) for b in range(2, 6)]


@agl.rollout
def agent(task: dict[str, Any], llm: agl.LLM) -> float:
    """Ask the model once; the reward is 1.0 if the right number is in its answer."""
    body = {"model": llm.model, "messages": [{"role": "user", "content": task["question"]}]}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {llm.api_key}"}
    request = urllib.request.Request(f"{llm.endpoint}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer = json.load(reply)["choices"][0]["message"]["content"]
    return float(str(task["answer"]) in answer)


def main() -> None:
    """Run every task once and print the rewards."""
    model = agl.ProxyLLM(endpoint=os.environ["GATEWAY_URL"], model=os.environ["MODEL"])
    trainer = agl.Trainer(algorithm=agl.Baseline(), initial_resources={"llm": model})
    trainer.fit(agent, train_dataset=TASKS)
    print(trainer.result)


if __name__ == "__main__":
    main()
