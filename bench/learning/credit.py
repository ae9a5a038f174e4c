"""Rewards of calls (`turn_advantage_weight`) against the reward of the rollout alone, with an equal number of rollouts.

An agent makes two calls: the first reply must be a digit, the second one a letter. The reward of the rollout is the sum
over its calls, and the agent also emits that of each call. In `lucky`, the reward of the second call does not depend on
its reply, so that it only adds noise to the first. The result is the mean probability of a right reply over prompts
that no task has.
"""

from __future__ import annotations

import random
from statistics import fmean
from typing import Any, Final, Literal

import agentlightning as agl
from agentlightning.demo.tasks import make_tasks
from bench.learning.game_policy import ask
from bench.learning.pairs import probability, train_each

Kind = Literal["right", "lucky"]
KINDS: Final[tuple[Kind, ...]] = ("right", "lucky")
RIGHT: Final = ("0123456789", "abcdefghijklmnopqrstuvwxyz")
"""Right replies of the first and of the second call."""
_LUCK: Final = 4.0


@agl.rollout
def two_calls(task: dict[str, Any], llm: agl.LLM) -> float:
    """Make both calls, emit the reward of each, and return their sum."""
    rewards: list[float] = []
    for turn, right in enumerate(RIGHT):
        reply = ask(llm, [{"role": "user", "content": f"{turn} {task['question']}"}])
        is_lucky = task["kind"] == "lucky" and turn == 1
        rewards.append(_LUCK * random.random() if is_lucky else float(reply != "" and reply in right))
        agl.emit_reward(rewards[-1])
    return sum(rewards)


def compare(kind: Kind, seed: int) -> tuple[float, float]:
    """Train twice from the same model, on the same tasks; return the results without and with the rewards of calls."""
    train, held_out = make_tasks(seed, train=24, held_out=64)
    tasks, values = [{**task, "kind": kind} for task in train], list[float]()
    for _, model in train_each(two_calls, tasks, seed, [{}, {"turn_advantage_weight": 1.0, "turn_gamma": 0.0}]):
        turns = range(1 if kind == "lucky" else 2)
        questions = [[f"{turn} {task['question']}" for task in held_out] for turn in turns]
        values.append(fmean(probability(model, questions[turn], RIGHT[turn]) for turn in turns))
    return values[0], values[1]
