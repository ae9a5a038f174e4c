"""A small model with good and bad habits, from which training selects.

It is the demo's model with the vocabulary of this example. It first imitates right queries and verdicts. Then, while
the learning rate falls, most queries are wrong: they name a column that does not exist, or omit the country. The
verdicts of the checker are always right.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

from agent import CHECK, REWRITE, WRITE, shown
from airports import Task, is_right, run_query, tasks

from agentlightning.demo.imitation import learn_by_imitation
from agentlightning.demo.model import make_model, make_tokenizer
from agentlightning.training.learner.policy import Policy

STEPS: Final = 1000
SETTLING: Final = 200  # the last steps, in which the learning rate falls to nothing
MIXED: Final = 100  # the last steps, in which most queries are wrong
SHARE_RIGHT: Final = 0.2
BATCH: Final = 32


def make_first_model(folder: Path, database: Path, seed: int = 0, steps: int = STEPS) -> None:
    """Write the model and its tokenizer to a folder."""
    parts = [task for part in ("train", "held_out", "shown") for task in tasks(part, database)]
    rng = random.Random(f"sql {seed}")
    examples = tasks("shown", database)
    words = [text for task in parts for text in (task["question"], *_queries(task))]
    errors = [shown(run_query(task["database"], query)) for task in examples for query in _queries(task)]
    tokenizer = make_tokenizer([WRITE, CHECK, REWRITE, "right", "wrong", *words, *errors])
    model = make_model(tokenizer, seed)

    def draw_conversations(remaining: int) -> list[list[dict[str, Any]]]:
        return [_draw(rng, examples, SHARE_RIGHT if remaining <= MIXED else 1.0) for _ in range(BATCH)]

    learn_by_imitation(model, tokenizer, draw_conversations, steps=steps, settling=SETTLING)
    Policy(model, tokenizer).save(folder)


def _queries(task: Task) -> list[str]:
    """Return the right query and two wrong ones."""
    query = task["query"]
    head, _, tail = query.partition(" WHERE country = ")
    without = head + tail[4:]  # the code in its quotes
    other = query.replace("elevation", "height").replace("lat", "north")
    return [query, without, other if other != query else query.replace("country", "land")]


def _draw(rng: random.Random, examples: list[Task], share_right: float) -> list[dict[str, Any]]:
    task = rng.choice(examples)
    right, *wrong = _queries(task)
    reply = right if rng.random() < share_right else rng.choice(wrong)
    kind = rng.random()
    if kind < 0.5:
        return _conversation(WRITE, task["question"], reply)
    before = rng.choice(wrong) if kind < 0.75 or rng.random() < 0.5 else right
    result = shown(run_query(task["database"], before))
    so_far = f"{task['question']}\n{before}\n{result}"
    if kind < 0.75:
        return _conversation(REWRITE, so_far, reply)
    return _conversation(CHECK, so_far, "right" if is_right(task, before) else "wrong")


def _conversation(instruction: str, text: str, reply: str) -> list[dict[str, Any]]:
    roles = ("system", "user", "assistant")
    return [{"role": role, "content": content} for role, content in zip(roles, (instruction, text, reply), strict=True)]
