"""The command pi: the commands it runs, and the number of rows of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.frameworks.engine import call, last, offered, said, steps
from tests.frameworks.harness import TaskResult
from tests.frameworks.suite import Promise


def as_shown(result: TaskResult) -> None:
    assert said(last(result.exchanges[-1].request)).strip() == "42"
    assert offered(result.exchanges[0].request) == {"write", "edit", "read", "bash"}


model = steps(
    call("write", 0, path="made.txt", content="41\n"),
    call("edit", 1, path="made.txt", edits=[{"oldText": "41", "newText": "42"}]),
    call("bash", 2, command="cat made.txt"),
    "It is 42.",
)


def test_it_edits_a_file_in_one_row(coder: Callable[[str], Any]) -> None:
    Promise("edits", model, [1.0] * 2, [4], direct=False, also=as_shown).check(coder("pi"))
