"""HarborAgent where Harbor is not installed; the rest is in tests/environments/harbor_agent."""

from __future__ import annotations

import importlib.util

import pytest

import agentlightning as agl
from agentlightning.cli.main import main

pytestmark = pytest.mark.skipif(importlib.util.find_spec("harbor") is not None, reason="Harbor is installed")


def test_without_its_package_it_names_the_extra() -> None:
    with pytest.raises(ImportError, match=r"requires Harbor.*: pip install 'agl-framework\[harbor\]'"):
        agl.HarborAgent("pi")


def test_the_command_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["harbor", "tasks", "examples/harness/tasks"]) == 2
    assert capsys.readouterr().err.startswith("agl: HarborAgent requires Harbor")
    assert main(["harbor", "tasks", "examples/harness/tasks", "--list"]) == 0


def test_a_machine_that_runs_only_the_algorithm_does_not_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_CURRENT_ROLE", "algorithm")
    assert agl.HarborAgent("pi", "docker").name == "pi"
    with pytest.raises(ValueError, match="tools must contain absolute paths"):
        agl.HarborAgent("pi", tools=["node"])
