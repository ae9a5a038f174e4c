"""Tasks of the demo: arithmetic questions in words, generated or from a file of the user.

A task is `{"question": str, "answer": int | float | str}`. The generator splits the facts (two numbers and an
operation) into three parts by a fixed rule, so that the training tasks, the held-out tasks and the imitation
tasks never share a fact, for any seed.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Literal, cast

from typing_extensions import TypedDict

from agentlightning.base.terminal import counted
from agentlightning.demo.settings import HELD_OUT_TASKS, MIN_USER_TASKS, TRAIN_TASKS

Part = Literal["train", "held_out", "imitation"]

EXAMPLE_LINE: Final = '{"question": "What is 34 plus 5?", "answer": 39}'
_WANTED: Final = f"Expected one JSON object per line, such as {EXAMPLE_LINE}"


class Task(TypedDict):
    """One line of a tasks file."""

    question: str
    answer: int | float | str


Operator = Literal["+", "-", "*"]
Fact = tuple[int, Operator, int]

PHRASES: Final[dict[Operator, tuple[str, ...]]] = {
    "+": (
        "What is {a} plus {b}?",
        "Add {a} and {b}.",
        "Find the sum of {a} and {b}.",
        "Ann has {a} apples and gets {b} more. How many apples has she?",
    ),
    "-": (
        "What is {a} minus {b}?",
        "Subtract {b} from {a}.",
        "Find the difference of {a} and {b}.",
        "Tom has {a} coins and loses {b}. How many coins are left?",
    ),
    "*": (
        "What is {a} times {b}?",
        "Multiply {a} by {b}.",
        "Find the product of {a} and {b}.",
        "There are {a} boxes of {b} pens. How many pens are there?",
    ),
}

_RESULTS: Final[dict[Operator, Callable[[int, int], int]]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}
_MOST_TASKS: Final = 3000  # of a part, each of which has 5,000 facts or more


def make_tasks(
    seed: int = 0, *, train: int = TRAIN_TASKS, held_out: int = HELD_OUT_TASKS
) -> tuple[list[Task], list[Task]]:
    """Return `train` training tasks and `held_out` held-out tasks. Each fact occurs in only one task.

    Raises:
        ValueError: More than 3,000 tasks are requested for one list. There are not enough facts.
    """
    rng = random.Random(f"tasks {seed}")
    return _distinct_tasks("train", train, rng), _distinct_tasks("held_out", held_out, rng)


def draw_imitation_task(rng: random.Random) -> tuple[Task, str]:
    """Return a task for imitation and its expression for the calculator (`"34 + 5"`)."""
    fact = _draw_fact("imitation", rng)
    return _task(fact, rng), "{} {} {}".format(*fact)


def _distinct_tasks(part: Part, count: int, rng: random.Random) -> list[Task]:
    if count > _MOST_TASKS:
        raise ValueError(f"{count} different tasks are too many for the split {part!r}. The maximum is {_MOST_TASKS}")
    facts: dict[Fact, None] = {}
    while len(facts) < count:
        facts[_draw_fact(part, rng)] = None
    return [_task(fact, rng) for fact in facts]


def _draw_fact(part: Part, rng: random.Random) -> Fact:
    while True:
        a, b = rng.randint(2, 99), rng.randint(2, 99)
        operator: Operator = rng.choice(("+", "-", "*"))
        if operator == "-" and a < b:
            a, b = b, a
        fact: Fact = (a, operator, b)
        low, high = sorted((a, b))  # `3 + 4` and `4 + 3` lie in the same part
        digit = (low * 7919 + high * 104_729 + ord(operator) * 31) % 1_000_003 % 10
        if part == ("train" if digit < 4 else "held_out" if digit < 7 else "imitation"):
            return fact


def _task(fact: Fact, rng: random.Random) -> Task:
    a, operator, b = fact
    question = rng.choice(PHRASES[operator]).format(a=a, b=b)
    return {"question": question, "answer": _RESULTS[operator](a, b)}


def load_tasks(path: str | Path, *, seed: int = 0) -> tuple[list[Task], list[Task]]:
    """Read the user's tasks from a JSONL file. Return training tasks and held-out tasks (a fifth, at most 256).

    The split is random with `seed`. Tasks with the same question are in the same list.

    Raises:
        ValueError: The file is missing or empty, has a line that is not a task (the message has the line and a valid
            example), or has fewer than 30 different questions.
    """
    tasks = list(_read_tasks(Path(path)))
    questions = list(dict.fromkeys(task["question"] for task in tasks))
    if len(questions) < MIN_USER_TASKS:
        raise ValueError(
            f"{path} contains {counted(len(questions), 'different question')}. At least {MIN_USER_TASKS} are required: "
            f"a fifth is held out for measurement, and with fewer than {MIN_USER_TASKS // 5} held-out tasks the sign "
            f"test cannot be significant (p < 0.05). Add questions. Example of a line: {EXAMPLE_LINE}"
        )
    random.Random(f"split {seed}").shuffle(questions)
    held_out_questions = set(questions[: min(HELD_OUT_TASKS, len(questions) // 5)])
    train = [task for task in tasks if task["question"] not in held_out_questions]
    held_out = [task for task in tasks if task["question"] in held_out_questions]
    return train, held_out


def _read_tasks(path: Path) -> Iterator[Task]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"Cannot read the tasks file {path}: {error.strerror}. {_WANTED}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}). {_WANTED}") from error
    if not text.strip():
        raise ValueError(f"The tasks file {path} is empty. {_WANTED}")
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value: object = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON ({error}). {_WANTED}") from error
        if not isinstance(value, dict):
            raise ValueError(f"{where}: expected a JSON object, got {type(value).__name__}. {_WANTED}")
        fields = cast("dict[str, object]", value)
        for name in ("question", "answer"):
            if name not in fields:
                names = ", ".join(fields) or "none"
                raise ValueError(f"{where}: the field {name!r} is missing (found: {names}). {_WANTED}")
        question, answer = fields["question"], fields["answer"]
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"{where}: 'question' must be a non-empty string; got {question!r}. {_WANTED}")
        is_no_answer = answer in ("", math.inf, -math.inf) or answer != answer
        if isinstance(answer, bool) or not isinstance(answer, int | float | str) or is_no_answer:
            raise ValueError(f"{where}: 'answer' must be a number or a string; got {answer!r}. {_WANTED}")
        yield {"question": question, "answer": answer}
