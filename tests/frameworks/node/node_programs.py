"""Runs the Node programs of `programs/` as agents; their packages are those that `environments.py` has installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl

PROGRAMS = Path(__file__).parent / "programs"
PRODUCTS = [{"a": 6, "b": 7, "value": 42}, {"a": 8, "b": 9, "value": 72}]

MODULES = Path(os.environ.get("AGL_TEST_NODE_MODULES", "not set"))

needs_node = pytest.mark.skipif(
    shutil.which("node") is None or not MODULES.is_dir(),
    reason="node or the packages of package.json is not installed: make test-frameworks",
)


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs, beside the packages that they import."""
    folder = tmp_path_factory.mktemp("node") / "programs"
    shutil.copytree(PROGRAMS, folder)
    (folder.parent / "node_modules").symlink_to(MODULES)
    return folder


def node_agent(program: Path, *arguments: str) -> Any:
    """Return an agent that runs a program for its task and returns the last line that it prints, which is JSON."""

    @agl.rollout
    def agent(task: str, llm: agl.LLM) -> Any:
        url, key = llm.get_base_url(), llm.api_key or "none"
        told = {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": key,
            "MODEL": llm.model,
            "TASK": task,
        }
        command = ["node", str(program), *arguments]
        environment = {"PATH": os.environ["PATH"], **told}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])  # some packages print warnings

    return agent
