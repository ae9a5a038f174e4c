"""`curriculum="solve_rate"` against passes over the tasks, with an equal number of rollouts, on two sets of tasks.

The policy is a small model with random weights. It must reply with a digit, which it does in about one of ten samples.
`mixed`: the reward of eleven of twelve tasks is fixed at 0 or 1, as with tasks that are far too hard or too easy.
`equal`: every task has the same difficulty. The result is the exact probability of a digit, over prompts that no task
has.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

import torch

import agentlightning as agl
from agentlightning.demo.model import make_model, make_tokenizer
from agentlightning.demo.tasks import make_tasks
from agentlightning.engine.chat import ChatFormat
from agentlightning.evaluation.statistics import Interval, difference_interval
from agentlightning.training.learner.policy import Policy
from bench.learning.game_policy import ask

TaskSet = Literal["mixed", "equal"]
SETS: Final[tuple[TaskSet, ...]] = ("mixed", "equal")
TASKS: Final = 24
USEFUL_EVERY: Final = 12
STEPS: Final = 24
SETTINGS: Final[dict[str, Any]] = {"batch_size": 4, "num_generations": 8, "learning_rate": 1e-3}


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
    tokenizer = make_tokenizer()
    values, useful = list[float](), list[int]()
    with tempfile.TemporaryDirectory() as folder:
        Policy(make_model(tokenizer, seed), tokenizer).save(Path(folder) / "model")
        for curriculum in ("none", "solve_rate"):
            run = Path(folder) / curriculum
            trainer = agl.Trainer(
                algorithm=agl.GRPO(
                    model=Path(folder) / "model",
                    max_steps=STEPS,
                    max_completion_length=1,
                    curriculum=curriculum,
                    alarms="none",
                    progress="none",
                    seed=seed,
                    output_dir=run,
                    **SETTINGS,
                ),
                store=agl.InMemoryLightningStore(),
                strategy="shm",
                runner={"type": "agentlightning.LitAgentRunner", "concurrency": 16},
            )
            trainer.fit(digit, train_dataset=tasks)
            groups = [figures.groups for figures in trainer.result.metrics]
            useful.append(sum(each["compared"] - each["equal_rewards"] for each in groups))
            values.append(_value(run / "model", [task["question"] for task in held_out]))
    return Pair((values[0], values[1]), (useful[0], useful[1]))


def difference(pairs: Sequence[Pair]) -> Interval:
    """Return the mean difference of the values, with its 95 % interval over the seeds (Student's t)."""
    return difference_interval([drawn - plain for plain, drawn in (pair.value for pair in pairs)], 1.0, is_binary=False)


def _value(model: Path, questions: Sequence[str]) -> float:
    """Return the mean probability that the reply to a question is a digit."""
    policy = Policy.load(model)
    chat_format = ChatFormat(policy.tokenizer)
    digits = cast("list[int]", policy.tokenizer.convert_tokens_to_ids(list("0123456789")))
    total = 0.0
    with torch.no_grad():
        for question in questions:
            prompt = torch.tensor([chat_format.prompt_ids([{"role": "user", "content": question}], None)])
            likely = cast("Any", policy.model)(input_ids=prompt).logits[0, -1].float().softmax(-1)  # (V,)
            total += float(likely[digits].sum())
    return total / len(questions)
