"""examples/harness: its tasks are ready, and its program runs a harness on them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.shown import EXAMPLES, ROOT
from tests.frameworks.engine import Engine, Json, call, said

pytest.importorskip("harbor", reason="Harbor is in an environment of its own: make test-harbor")
pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
MINI = ROOT / ".venv-harbor/tools"


def run(*command: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, timeout=200, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_task_is_ready() -> None:
    checked = json.loads(run("-m", "agentlightning.cli", "harbor", "tasks", "examples/harness/tasks", "--json"))
    assert [(each["verdict"], each["untouched"], each["solved"]) for each in checked] == [("ready", 0.0, 1.0)] * 5
    readme = (EXAMPLES / "harness/README.md").read_text()
    assert all(f"\n{each['name']:<12}  ready" in readme for each in checked)


def knows_two(request: Json) -> Json:
    """A model that solves two of the tasks."""
    text = " ".join(said(message) for message in request["messages"] if message["role"] == "user")
    solve = {"count.txt": "wc -w < text.txt > count.txt", "sum.txt": "echo 40 > sum.txt"}
    command = next((does for word, does in solve.items() if word in text), "ls")
    turn = sum(message["role"] == "tool" for message in request["messages"])
    return call("bash", turn, command=command if turn == 0 else "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


@pytest.mark.skipif(not MINI.exists(), reason="mini-swe-agent is not installed: make test-harbor")
def test_the_program_prints_which_tasks_were_solved() -> None:
    with Engine(knows_two) as engine:
        model = ("--url", engine.base_url, "--model", "policy")
        printed = run("examples/harness/run.py", "mini-swe-agent", "--tools", MINI, *model)
        assert engine.trouble == []
    assert dict(line.split(maxsplit=1) for line in printed.splitlines()[-5:]) == {
        "count-words": "solved",
        "find-secret": "not solved",
        "fix-product": "not solved",
        "sum-column": "solved",
        "write-median": "not solved",
    }
