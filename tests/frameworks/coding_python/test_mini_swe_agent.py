"""The command mini: what it runs, and how many rows a run is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.frameworks.engine import call, last, said, steps
from tests.frameworks.harness import TaskResult
from tests.frameworks.suite import Promise

model = steps(
    call("bash", 0, command="printf 42 > made.txt"),
    call("bash", 1, command="cat made.txt"),
    call("bash", 2, command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat made.txt"),
)


def is_made(result: TaskResult) -> None:
    assert '"output": "42"' in said(last(result.exchanges[-1].request))


def test_it_makes_a_file_in_one_row(coder: Callable[[str], Any]) -> None:
    Promise("makes", model, [1.0] * 2, [3], direct=False, also=is_made).check(coder("mini-swe-agent"))
