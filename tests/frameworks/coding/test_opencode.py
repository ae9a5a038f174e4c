"""The command opencode: what it runs, and that its call for a title is no part of the agent's work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.frameworks.engine import Json, call, last, offered, said
from tests.frameworks.harness import run_agent


def model(request: Json) -> str | Json:
    """Make a file, edit it, look at it, and say what is in it."""
    if not offered(request):
        return "A file"
    steps = [
        call("write", 0, filePath="made.txt", content="41\n"),
        call("edit", 1, filePath="made.txt", oldString="41", newString="42"),
        call("bash", 2, command="cat made.txt", description="Show the file"),
        "It is 42.",
    ]
    return steps[sum(message["role"] == "tool" for message in request["messages"])]


def test_it_edits_a_file_in_one_row_and_asks_for_a_title(coder: Callable[[str], Any]) -> None:
    for result in run_agent(coder("opencode"), model, direct=False, in_order=False, exact=False):
        assert result.output == 1.0
        work = [exchange for exchange in result.exchanges if offered(exchange.request)]
        assert said(last(work[-1].request)).strip() == "42"
        assert {"write", "edit", "read", "bash", "task"} <= offered(work[0].request)
        assert len(result.exchanges) == 5
        assert list(result.record.exclusions.values()) == ["helper"]
        (row,) = result.record.samples
        assert len(row.call_ids) == 4
        reply = work[-1].reply
        assert reply is not None
        assert row.token_ids == reply["prompt_token_ids"] + reply["choices"][0]["token_ids"]
