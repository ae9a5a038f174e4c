"""`curriculum="solve_rate"` against passes over the tasks, with an equal number of rollouts, on two sets of tasks.

The policy must reply with a digit, which it does in about one of ten samples. `mixed`: the reward of eleven of twelve
tasks is fixed at 0 or 1, as with tasks that are far too hard or too easy. `equal`: every task has the same difficulty.
The result is the probability of a digit over prompts that no task has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import agentlightning as agl
from agentlightning.demo.tasks import make_tasks
from bench.learning.game_policy import ask
from bench.learning.pairs import probability, train_each

TaskSet = Literal["mixed", "equal"]
SETS: Final[tuple[TaskSet, ...]] = ("mixed", "equal")
TASKS: Final = 24
USEFUL_EVERY: Final = 12


@dataclass(frozen=True)
class Pair:
    """Results of one seed without and with the curriculum."""

    value: tuple[float, float]
    """Probability of a digit at the end."""
    useful: tuple[int, int]
    """Number of groups with different rewards."""


@agl.rollout
def digit(task: dict[str, Any], llm: agl.LLM) -> float:
    """Return 1 for a digit, or the fixed reward of the task."""
    reply = ask(llm, [{"role": "user", "content": task["question"]}])
    return float(reply.isdigit()) if task["fixed"] is None else task["fixed"]


def compare(task_set: TaskSet, seed: int) -> Pair:
    """Train twice from the same model, on the same tasks."""
    train, held_out = make_tasks(seed, train=TASKS, held_out=64)
    every = USEFUL_EVERY if task_set == "mixed" else 1
    tasks = [{**task, "fixed": None if n % every == 0 else float(n % 2)} for n, task in enumerate(train)]
    values, useful = list[float](), list[int]()
    for result, model in train_each(digit, tasks, seed, [{"curriculum": "none"}, {"curriculum": "solve_rate"}]):
        groups = [figures.groups for figures in result.metrics]
        useful.append(sum(each["compared"] - each["equal_rewards"] for each in groups))
        values.append(probability(model, [task["question"] for task in held_out], "0123456789"))
    return Pair((values[0], values[1]), (useful[0], useful[1]))
