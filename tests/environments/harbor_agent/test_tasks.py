"""`agl harbor tasks`: the check of a data set before training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentlightning.cli.main import main
from tests.environments.harbor_agent.tasks import FILES, TOML, make_task
from tests.stubs.model_server import ModelServer

ALWAYS = "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A data set with one task of each kind."""
    make_task(tmp_path / "always", {"tests/test.sh": ALWAYS})
    make_task(tmp_path / "image", {"environment/Dockerfile": "FROM x\nRUN cowsay\n"})
    make_task(tmp_path / "ready")
    make_task(tmp_path / "silent", {"tests/test.sh": "#!/bin/bash\n"})
    make_task(tmp_path / "unsolved", {"solution/solve.sh": None})
    make_task(tmp_path / "wrong", {"solution/solve.sh": "#!/bin/bash\n"})
    (tmp_path / "notes.md").write_text("no task")
    return tmp_path


def test_each_task_is_checked_without_work_and_with_its_solution(
    tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["harbor", "tasks", str(tasks), "--json"]) == 1
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert {name: (each["verdict"], each["untouched"], each["solved"]) for name, each in found.items()} == {
        "always": ("not ready", 1.0, 1.0),
        "image": ("not ready", None, None),
        "ready": ("ready", 0.0, 1.0),
        "silent": ("not ready", None, None),
        "unsolved": ("no solution", 0.0, None),
        "wrong": ("not ready", 0.0, 0.0),
    }
    problems = {name: each["problem"] for name, each in found.items()}
    assert problems["ready"] is problems["unsolved"] is None
    assert problems["always"] == "the verifier returns 1 for the solution, which is not more than 1 for no work"
    assert "cannot follow the Dockerfile at line 2, 'RUN cowsay'" in problems["image"]
    assert "RewardFileNotFoundError" in problems["silent"]


def test_a_single_task_and_its_table(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["harbor", "tasks", str(tasks / "ready")]) == 0
    assert "1 of 1 tasks can be used" in capsys.readouterr().out


def test_a_list_runs_nothing(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["harbor", "tasks", str(tasks), "--list"]) == 0
    assert capsys.readouterr().out.count(str(tasks)) == 6


@pytest.mark.parametrize("place", ["nowhere", "empty"])
def test_a_folder_without_tasks(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["harbor", "tasks", str(tmp_path / place)]) == 2
    assert str(tmp_path / place) in capsys.readouterr().err


def test_an_environment_without_its_program_is_named_once(
    tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tasks))
    assert main(["harbor", "tasks", str(tasks), "--environment", "podman"]) == 1
    assert "podman cannot be used on this machine: Podman is not installed" in capsys.readouterr().err


def test_a_task_of_terminal_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The form of its tasks: metadata, limits, resources, and pytest-like tests that test.sh runs."""
    toml = """schema_version = "1.0"
[metadata]
author_name = "me"
difficulty = "easy"
category = "software-engineering"
tags = ["python"]
[verifier]
timeout_sec = 60.0
[agent]
timeout_sec = 60.0
[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 2048
storage_mb = 10240
"""
    outputs = "import sys\nsys.path.insert(0, '/app')\nimport calc\nassert calc.mul(6, 7) == 42\n"
    test = (
        "#!/bin/bash\npython3 /tests/test_outputs.py\n"
        "if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi\n"
    )
    changed = {"task.toml": toml, "tests/test.sh": test, "tests/test_outputs.py": outputs}
    assert main(["harbor", "tasks", str(make_task(tmp_path, changed)), "--json"]) == 0
    [checked] = json.loads(capsys.readouterr().out)
    assert (checked["verdict"], checked["problem"]) == ("ready", None)
    assert TOML in FILES.values()


def test_a_try_runs_a_harness_on_tasks_and_shows_its_conversation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_task(tmp_path / "always", {"tests/test.sh": ALWAYS})
    make_task(tmp_path / "silent", {"tests/test.sh": "#!/bin/bash\n"})
    harness = ("--harness", "tests.environments.harbor_agent.agents:AskOnce")
    with ModelServer(lambda request: "It is 42") as server:
        server.models = [{"id": "m"}]
        assert main(["env", "try", f"harbor:{tmp_path}", *harness, "--model", server.base_url]) == 1
    shown = capsys.readouterr().out
    assert "user: What is 6 times 7?\nassistant: It is 42\nreward: 1\n" in shown
    assert "assistant: It is 42\nno reward (failed infrastructure_fault trial_failed: " in shown
    assert shown.endswith("2 tasks: mean reward 1.000, 1 without a reward\n")
