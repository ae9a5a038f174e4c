"""The command codex with its default tools: the commands it runs, the tools of the model, the rows of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.frameworks.engine import call, last, offered, said, steps
from tests.frameworks.harness import TaskResult
from tests.frameworks.suite import Promise

PATCH = "*** Begin Patch\n*** Add File: made.txt\n+42\n*** End Patch\n"
show = call("exec_command", 1, cmd="cat made.txt")
by_command = steps(call("exec_command", 0, cmd="printf 42 > made.txt"), show, "It is 42.")
by_patch = steps(call("apply_patch", 0, input=PATCH), show, "It is 42.")


def is_made(result: TaskResult) -> None:
    assert said(last(result.exchanges[-1].request)).strip().endswith("42")


def as_shown(result: TaskResult) -> None:
    is_made(result)
    names = offered(result.exchanges[0].request)
    assert "exec_command" in names
    assert any("__" in name for name in names)
    assert not any("search" in name for name in names)


MADE = Promise("made", by_command, [1.0] * 2, [3], direct=False, also=as_shown)


def test_what_the_model_calls_is_run_and_the_run_is_one_row(coder: Callable[[str], Any]) -> None:
    MADE.check(coder("codex"))


def test_a_patch_of_free_text_is_applied_where_codex_knows_the_model(coder: Callable[[str], Any]) -> None:
    MADE.but(model=by_patch, options={"model": "gpt-5.5"}, also=is_made).check(coder("codex"))
