"""The command codex with its default tools: what it runs, which tools the model sees, and how many rows a run is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import agentlightning as agl
from tests.frameworks.engine import Json, call, last, offered
from tests.frameworks.harness import run_agent

CODEX = Path(os.environ.get("AGL_TEST_NODE_MODULES", "not set")) / ".bin/codex"
pytestmark = pytest.mark.skipif(not CODEX.exists(), reason="codex is not installed: make test-frameworks")


def codex(folder: Path) -> object:
    """Return an agent that runs codex in a folder of its task's and returns its last words and the files there."""

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> list[str]:
        home, place = folder / f"home {task}", folder / task
        home.mkdir()
        place.mkdir()
        provider = f'{{name="agl", base_url="{llm.get_base_url()}", env_key="AGENT_KEY", wire_api="responses"}}'
        settings = ["-c", f"model_providers.agl={provider}", "-c", 'model_provider="agl"', "-m", llm.model]
        bare = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        told = {**os.environ, "CODEX_HOME": str(home), "AGENT_KEY": llm.api_key or "none"}
        done = subprocess.run(
            [CODEX, "exec", *bare, *settings, task],
            cwd=place,
            env=told,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return [done.stdout.strip(), *(path.read_text() for path in place.iterdir())]

    return agent


def test_what_the_model_calls_is_run_and_the_run_is_one_row(tmp_path: Path) -> None:
    def model(request: Json) -> str | Json:
        return "It is made." if last(request)["role"] == "tool" else call("exec_command", cmd="printf 42 > made.txt")

    for result in run_agent(codex(tmp_path), model, direct=False):
        assert result.output == ["It is made.", "42"]
        assert len(result.exchanges) == 2
        assert len(result.record.samples) == 1
        names = offered(result.exchanges[0].request)
        assert "exec_command" in names
        assert any("__" in name for name in names)
        assert not any("search" in name for name in names)
