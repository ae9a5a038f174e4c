"""The demo's tasks: made from a seed without overlap, or read from a file of the user."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from agentlightning.demo.calculator import calculate
from agentlightning.demo.tasks import Task, draw_imitation_task, load_tasks, make_tasks
from agentlightning.evaluation.paired import compare_rewards


def numbers(task: Task) -> tuple[int, ...]:
    return tuple(sorted(int(number) for number in re.findall(r"\d+", task["question"])))


def write(folder: Path, tasks: list[Task]) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("\n".join(json.dumps(task) for task in tasks))
    return path


def test_the_generator_makes_as_many_as_promised_and_the_same_for_the_same_seed() -> None:
    train, held_out = make_tasks(7)
    assert (len(train), len(held_out)) == (512, 256)
    assert make_tasks(7) == (train, held_out)
    assert make_tasks(8) != (train, held_out)


def test_no_fact_is_both_trained_and_held_out_nor_shown_in_the_warm_start() -> None:
    train, held_out = make_tasks(0, train=3000, held_out=2000)
    rng = random.Random(0)
    shown = [draw_imitation_task(rng)[0] for _ in range(2000)]
    facts = [{(numbers(task), task["answer"]) for task in part} for part in (train, held_out, shown)]
    assert not facts[0] & facts[1]
    assert not facts[0] & facts[2]
    assert not facts[1] & facts[2]


def test_the_answers_are_right() -> None:
    rng = random.Random(1)
    for _ in range(200):
        task, expression = draw_imitation_task(rng)
        assert calculate(expression) == str(task["answer"])
    by_hand = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}
    for task in make_tasks(3)[0]:
        if match := re.fullmatch(r"What is (\d+) (\w+) (\d+)\?", task["question"]):
            a, word, b = match.groups()
            assert by_hand[word](int(a), int(b)) == task["answer"]


def test_more_tasks_than_there_are_facts_are_refused() -> None:
    with pytest.raises(ValueError, match="100000 different tasks are too many"):
        make_tasks(0, train=100_000)


def test_a_fifth_of_the_users_tasks_is_held_out_and_equal_questions_stay_together(tmp_path: Path) -> None:
    tasks: list[Task] = [{"question": f"How much is {n % 40}?", "answer": n % 40} for n in range(80)]
    train, held_out = load_tasks(write(tmp_path, tasks))
    assert len(held_out) == 16
    assert len(train) == 64
    assert not {task["question"] for task in train} & {task["question"] for task in held_out}


def test_the_smallest_file_has_enough_held_out_tasks_for_a_significant_sign_test(tmp_path: Path) -> None:
    _, held_out = load_tasks(write(tmp_path, [{"question": f"How much is {n}?", "answer": n} for n in range(30)]))
    pairs = len(held_out)
    assert compare_rewards([0.0] * pairs, [1.0] * pairs).verdict == "better"
    assert compare_rewards([0.0] * (pairs - 1), [1.0] * (pairs - 1)).verdict == "no evidence"


def test_blank_lines_do_not_count_and_texts_are_answers_too(tmp_path: Path) -> None:
    path = write(tmp_path, [{"question": f"Spell {n}", "answer": f"word {n}"} for n in range(30)])
    path.write_text(path.read_text().replace("\n", "\n\n") + "\n")
    train, held_out = load_tasks(path)
    assert len(train) + len(held_out) == 30


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("not json", "not JSON"),
        ('{"question": "What is 2?"}', r"the field 'answer' is missing \(found: question\)"),
        ('{"answer": 2}', "the field 'question' is missing"),
        ("[1, 2]", "expected a JSON object, got list"),
        ('{"question": " ", "answer": 2}', "'question' must be a non-empty string"),
        *((f'{{"question": "What?", "answer": {answer}}}', "'answer' must be a number or a string")
          for answer in ("true", "NaN", "Infinity", "null", '""', "[1]")),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named_by_its_number_in_the_file(tmp_path: Path, line: str, text: str) -> None:
    path = write(tmp_path, [{"question": f"What is {n}?", "answer": n} for n in range(16)])
    path.write_text(path.read_text() + "\n" + line + "\n")
    with pytest.raises(ValueError, match=rf"line 17: {text}.*Expected one JSON object per line, such as .*34 plus 5"):
        load_tasks(path)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        load_tasks(path)
