"""The command mini: what it runs, and how many rows a run is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.frameworks.engine import Json, call, last, said
from tests.frameworks.harness import run_agent


def model(request: Json) -> Json:
    """Make a file, look at it, and hand in what is in it."""
    steps = [
        call("bash", 0, command="printf 42 > made.txt"),
        call("bash", 1, command="cat made.txt"),
        call("bash", 2, command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat made.txt"),
    ]
    return steps[sum(message["role"] == "tool" for message in request["messages"])]


def test_it_makes_a_file_in_one_row(coder: Callable[[str], Any]) -> None:
    for result in run_agent(coder("mini-swe-agent"), model, direct=False):
        assert result.output == 1.0
        assert '"output": "42"' in said(last(result.exchanges[-1].request))
        assert [len(row.call_ids) for row in result.record.samples] == [3]
