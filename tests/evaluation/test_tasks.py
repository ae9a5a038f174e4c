"""Slices of tasks: fields, nested fields, functions, and tasks without the field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from agentlightning.evaluation.tasks import slices_of, tasks_of

TASKS: list[Any] = [
    {"level": "easy", "meta": {"source": "a"}},
    {"level": "hard", "meta": {"source": None}},
    {"meta": {}, "a.b": 1},
    "no mapping",
]


def test_a_task_without_the_field_is_in_a_slice_of_its_own() -> None:
    assert slices_of(TASKS, "level") == [("level=easy",), ("level=hard",), ("level=(missing)",), ("level=(missing)",)]
    assert [each[0] for each in slices_of(TASKS, "meta.source")] == ["meta.source=a"] + ["meta.source=(missing)"] * 3


def test_fields_with_dots_attributes_and_functions() -> None:
    @dataclass
    class Task:
        level: int

    assert slices_of(TASKS, "a.b")[2] == ("a.b=1",)
    assert slices_of([Task(1), Task(2)], "level") == [("level=1",), ("level=2",)]

    def parity(task: int) -> str:
        return "odd" if task % 2 else "even"

    assert slices_of([1, 2], [parity, lambda task: task > 1]) == [
        ("parity=odd", "slice=False"),
        ("parity=even", "slice=True"),
    ]
    assert slices_of([1, 2], None) == [(), ()]


def test_a_secret_is_no_name_of_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "correct-horse-battery")
    [(name,)] = slices_of([{"user": "x" * 75 + "correct-horse-battery"}], "user")
    assert "horse" not in name
    assert "corre" not in name


@pytest.mark.parametrize(
    ("tasks", "by", "error", "message"),
    [
        ([{"level": 1}], "levle", ValueError, "no task has this field; fields of the first task: level"),
        (list(range(200)), str, ValueError, "has 200 values; the maximum is 100"),
        ([1], [], ValueError, "slices is an empty list"),
        ([1], [lambda task: 1, lambda task: 2], ValueError, "contains a name twice"),
        ([1], 3, TypeError, "a field, a function or a list of them; got int"),
        ([1], [3], TypeError, "got 3"),
    ],
)
def test_what_makes_no_slices_is_refused(tasks: list[Any], by: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        slices_of(tasks, by)


def test_equal_tasks_have_equal_digests() -> None:
    one, same, other = tasks_of([{"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1}])
    assert one == same != other
