"""The command of Claude Code: what it runs, its default tools, and how many rows a run is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.frameworks.engine import Json, call, last, offered, said
from tests.frameworks.harness import run_agent


def model(request: Json) -> Json:
    """Make a file, edit it, look at it, and say what is in it, each time after a thought."""
    steps: list[Json] = [
        call("Write", 0, file_path="made.txt", content="41\n"),
        call("Edit", 1, replace_all=False, file_path="made.txt", old_string="41", new_string="42"),
        call("Bash", 2, command="cat made.txt", description="Show the file"),
        {"content": "It is 42."},
    ]
    return {"reasoning_content": "Let me see.", **steps[sum(one["role"] == "tool" for one in request["messages"])]}


def test_it_edits_a_file_in_one_row(coder: Callable[[str], Any]) -> None:
    for result in run_agent(coder("claude-code"), model, direct=False):
        assert result.output == 1.0
        assert said(last(result.exchanges[-1].request)) == "42"
        assert len(result.exchanges) == 4
        assert [len(row.call_ids) for row in result.record.samples] == [4]
        assert {"Write", "Edit", "Read", "Bash", "Agent"} <= offered(result.exchanges[0].request)
