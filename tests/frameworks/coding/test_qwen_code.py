"""The command qwen: what it runs and how many rows a run is; and that of gemini-cli, which the gateway refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from tests.frameworks.engine import call, last, offered, said, steps
from tests.frameworks.harness import TaskResult, run_agent
from tests.frameworks.suite import Promise

SHELL = {"is_background": False, "description": "Use the shell"}
model = steps(
    call("run_shell_command", 0, command="printf 42 > made.txt", **SHELL),
    call("run_shell_command", 1, command="cat made.txt", **SHELL),
    "It is 42.",
)


def as_shown(result: TaskResult) -> None:
    assert "Output: 42" in said(last(result.exchanges[-1].request))
    assert {"write_file", "edit", "read_file", "run_shell_command"} <= offered(result.exchanges[0].request)


def test_it_makes_a_file_in_one_row(coder: Callable[[str], Any]) -> None:
    Promise("makes", model, [1.0] * 2, [3], direct=False, also=as_shown).check(coder("qwen-code"))


@pytest.mark.skipif(
    "AGL_TEST_FRAMEWORK" not in os.environ or shutil.which("gemini") is None,
    reason="gemini-cli is not installed: make test-frameworks",
)
def test_gemini_cli_says_that_its_api_is_not_served(tmp_path: Path) -> None:
    errors: list[str] = []
    settings = {"security": {"auth": {"selectedType": "gemini-api-key"}}, "privacy": {"usageStatisticsEnabled": False}}

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> float:
        home = tmp_path / task.replace("?", "")
        (home / ".gemini").mkdir(parents=True)
        (home / ".gemini/settings.json").write_text(json.dumps(settings))
        address = {"GOOGLE_GEMINI_BASE_URL": llm.get_base_url(), "GEMINI_API_KEY": llm.api_key or "unused"}
        done = subprocess.run(
            ["gemini", "--skip-trust", "--model", llm.model, "--prompt", task],
            cwd=home,
            env={**os.environ, **address, "HOME": str(home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode != 0
        errors.append(done.stderr)
        return 0.0

    for result in run_agent(agent, model, direct=False, exact=False):
        assert result.exchanges == []
    for words in errors:
        assert "is a route of Gemini's API, which this gateway does not serve. Configure the agent to use" in words
    assert len(errors) == 2
