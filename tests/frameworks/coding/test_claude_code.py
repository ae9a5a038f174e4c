"""The command of Claude Code: the commands it runs, its default tools, and the number of rows of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.frameworks.engine import Json, call, last, offered, said, steps
from tests.frameworks.harness import TaskResult
from tests.frameworks.suite import Promise

edits = steps(
    call("Write", 0, file_path="made.txt", content="41\n"),
    call("Edit", 1, replace_all=False, file_path="made.txt", old_string="41", new_string="42"),
    call("Bash", 2, command="cat made.txt", description="Show the file"),
    {"content": "It is 42."},
)


def model(request: Json) -> Json:
    return {"reasoning_content": "Let me see.", **edits(request)}


def as_shown(result: TaskResult) -> None:
    assert said(last(result.exchanges[-1].request)) == "42"
    assert {"Write", "Edit", "Read", "Bash", "Agent"} <= offered(result.exchanges[0].request)


def test_it_edits_a_file_in_one_row(coder: Callable[[str], Any]) -> None:
    Promise("edits", model, [1.0] * 2, [4], direct=False, also=as_shown).check(coder("claude-code"))
