"""The command opencode: the commands it runs, and its call for a title, which is no part of the agent's work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.frameworks.engine import Json, call, last, offered, said, steps
from tests.frameworks.harness import TaskResult
from tests.frameworks.suite import Promise

edits = steps(
    call("write", 0, filePath="made.txt", content="41\n"),
    call("edit", 1, filePath="made.txt", oldString="41", newString="42"),
    call("bash", 2, command="cat made.txt", description="Show the file"),
    "It is 42.",
)


def model(request: Json) -> str | Json:
    return edits(request) if offered(request) else "A file"


def as_shown(result: TaskResult) -> None:
    work = [exchange for exchange in result.exchanges if offered(exchange.request)]
    assert said(last(work[-1].request)).strip() == "42"
    assert {"write", "edit", "read", "bash", "task"} <= offered(work[0].request)
    assert len(result.exchanges) == 5
    assert list(result.record.exclusions.values()) == ["helper"]
    reply = work[-1].reply
    assert reply is not None
    assert result.record.samples[0].token_ids == reply["prompt_token_ids"] + reply["choices"][0]["token_ids"]


def test_it_edits_a_file_in_one_row_and_asks_for_a_title(coder: Callable[[str], Any]) -> None:
    loose = {"exact": False}
    Promise("edits", model, [1.0] * 2, [4], direct=False, in_order=False, options=loose, also=as_shown).check(
        coder("opencode")
    )
