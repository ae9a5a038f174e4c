"""The command aider: what it writes and commits, and that the call for a commit's message is no part of the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.frameworks.engine import Json, said
from tests.frameworks.harness import run_agent


def model(request: Json) -> str:
    """Write a file with the answer, or the message of the commit."""
    if "Git commit message" in said(request["messages"][0]):
        return "feat: Make a file"
    return "It is made.\n\nmade.txt\n```\n42\n```\n"


def test_it_writes_a_file_and_commits_it(coder: Callable[[str], Any]) -> None:
    for result in run_agent(coder("aider"), model, direct=False, exact=False):
        assert result.output == 1.0
        work, commit = result.exchanges
        assert "diff --git a/made.txt b/made.txt" in said(commit.request["messages"][-1])
        assert list(result.record.exclusions.values()) == ["helper"]
        (row,) = result.record.samples
        assert work.reply is not None
        assert row.token_ids == work.reply["prompt_token_ids"] + work.reply["choices"][0]["token_ids"]
