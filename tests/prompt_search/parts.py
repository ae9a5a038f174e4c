"""An agent that heeds rules of its prompt, and a critic and editor on a socket that know which rules there are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import agentlightning as agl
from agentlightning.prompt_search.results import RolloutResult
from tests.stubs.model_server import ModelServer

SEED = "Answer the question: {question}"
RULES = ("Give a number.", "Name the unit.", "Show no steps.")
"""Each rule that a prompt has is worth a third of the reward."""
TRAIN = [{"question": f"train {number}"} for number in range(6)]
VAL = [{"question": f"val {number}"} for number in range(8)]


def reward_of(prompt: str) -> float:
    return sum(rule in prompt for rule in RULES) / len(RULES)


@agl.rollout
def heeds_rules(task: dict[str, str], main_prompt: agl.PromptTemplate) -> float:
    """An agent without a model: the rules in its prompt decide."""
    return reward_of(main_prompt.format(**task))


def resources(template: str = SEED, **more: Any) -> dict[str, Any]:
    return {"main_prompt": agl.PromptTemplate(template=template, engine="f-string"), **more}


def result(reward: float | None, **more: Any) -> RolloutResult:
    """Return a result with this reward; without one it is late."""
    fields: dict[str, Any] = {
        "rollout_id": f"ro-{reward}",
        "task": reward,
        "status": "succeeded",
        "final_reward": reward,
        "failure": None if reward is not None else "timeout",
        "messages": [],
        "spans": [],
    }
    return RolloutResult(**{**fields, **more})  # type: ignore[typeddict-item]


def template_in(request: dict[str, Any]) -> str:
    """Return the template that a critic or editor is asked about."""
    text = "\n".join(message["content"] for message in request["messages"])
    match = re.search(r"<template>\n(.*?)\n</template>", text, re.DOTALL)
    assert match is not None, text
    return match[1]


def is_edit(request: dict[str, Any]) -> bool:
    return any("<critique>" in message["content"] for message in request["messages"])


def helpful(request: dict[str, Any]) -> str:
    """Answer as a critic that names the next missing rule, and as an editor that adds it."""
    template = template_in(request)
    missing = [rule for rule in RULES if rule not in template]
    if not is_edit(request):
        return f"- It must say: {missing[0] if missing else 'nothing more'}"
    return f"{template}\n{missing[0]}" if missing else f"{template} Well done."


@contextmanager
def asked(answer: Callable[[dict[str, Any]], str] = helpful) -> Iterator[ModelServer]:
    with ModelServer(answer) as server:
        yield server


SMALL = {"gradient_batch_size": 2, "val_batch_size": 4, "beam_width": 2, "branch_factor": 2, "beam_rounds": 3}


def llm(server: ModelServer) -> agl.LLM:
    return agl.LLM(endpoint=server.base_url, model="critic")


def trainer_of(algorithm: agl.APO[Any] | agl.GEPA[Any], **settings: Any) -> agl.Trainer:
    settings_by_default = {
        "strategy": "shm",
        "initial_resources": resources(),
        "progress": "none",
        "runner": {"type": "agentlightning.LitAgentRunner", "concurrency": 4},
    }
    return agl.Trainer(algorithm=algorithm, **{**settings_by_default, **settings})


def fit(algorithm: agl.APO[Any] | agl.GEPA[Any], agent: Any = heeds_rules, **settings: Any) -> agl.PromptResult:
    """Run a search with threads of this process and return its result."""
    trainer = trainer_of(algorithm, **settings)
    trainer.fit(agent, train_dataset=TRAIN, val_dataset=VAL)
    return trainer.result
