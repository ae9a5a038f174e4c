"""The command pi: what it runs, and how many rows a run is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.frameworks.engine import Json, call, last, offered, said
from tests.frameworks.harness import run_agent


def model(request: Json) -> str | Json:
    """Make a file, edit it, look at it, and say what is in it."""
    steps = [
        call("write", 0, path="made.txt", content="41\n"),
        call("edit", 1, path="made.txt", edits=[{"oldText": "41", "newText": "42"}]),
        call("bash", 2, command="cat made.txt"),
        "It is 42.",
    ]
    return steps[sum(message["role"] == "tool" for message in request["messages"])]


def test_it_edits_a_file_in_one_row(coder: Callable[[str], Any]) -> None:
    for result in run_agent(coder("pi"), model, direct=False):
        assert result.output == 1.0
        assert said(last(result.exchanges[-1].request)).strip() == "42"
        assert [len(row.call_ids) for row in result.record.samples] == [4]
        assert offered(result.exchanges[0].request) == {"write", "edit", "read", "bash"}
