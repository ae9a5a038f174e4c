"""The command codex with its default tools: what it runs, which tools the model sees, and how many rows a run is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.frameworks.engine import Json, call, last, offered, said
from tests.frameworks.harness import run_agent


def model(request: Json) -> str | Json:
    """Make a file, look at it, and say what is in it."""
    steps = [
        call("exec_command", 0, cmd="printf 42 > made.txt"),
        call("exec_command", 1, cmd="cat made.txt"),
        "It is 42.",
    ]
    return steps[sum(message["role"] == "tool" for message in request["messages"])]


def test_what_the_model_calls_is_run_and_the_run_is_one_row(coder: Callable[[str], Any]) -> None:
    for result in run_agent(coder("codex"), model, direct=False):
        assert result.output == 1.0
        assert said(last(result.exchanges[-1].request)).endswith("42")
        assert [len(row.call_ids) for row in result.record.samples] == [3]
        names = offered(result.exchanges[0].request)
        assert "exec_command" in names
        assert any("__" in name for name in names)
        assert not any("search" in name for name in names)


def test_a_patch_of_free_text_is_applied_where_codex_knows_the_model(coder: Callable[[str], Any]) -> None:
    patch = "*** Begin Patch\n*** Add File: made.txt\n+42\n*** End Patch\n"

    def patching(request: Json) -> str | Json:
        is_first = last(request)["role"] != "tool"
        return call("apply_patch", 0, input=patch) if is_first else model(request)

    for result in run_agent(coder("codex"), patching, direct=False, model="gpt-5.5"):
        assert result.output == 1.0
        assert said(last(result.exchanges[-1].request)).strip().endswith("42")
        assert [len(row.call_ids) for row in result.record.samples] == [3]
