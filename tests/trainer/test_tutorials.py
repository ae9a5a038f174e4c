"""The tutorials: their commands, and their programs on several machines."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.cli import main
from agentlightning.errors import MissingExtraError
from tests.pages import OF_THE_DOCUMENTS, blocks, run_page
from tests.stubs.ports import free_port
from tests.stubs.processes import Process, Terminal

CONFIGURATIONS = "how-to/update-v03-configurations.md"


def page_of(lesson: str) -> str:
    return f"tutorials/{lesson}.md"


def commands(lesson: str) -> list[str]:
    return [line for block in blocks(page_of(lesson), "bash") for line in block.splitlines() if line.startswith("agl ")]


def test_the_commands_of_the_lessons_show_the_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for lesson, expected in (("1-first-agent", "KeyError: 'figs'"), ("5-debug-a-run", "ZeroDivisionError")):
        (tmp_path / lesson).mkdir()
        monkeypatch.chdir(tmp_path / lesson)
        monkeypatch.delenv("AGL_TOKEN", raising=False)
        module, _ = run_page(page_of(lesson), monkeypatch)
        result = module.before if lesson == "1-first-agent" else module.result_of_cases
        crashed = next(each.rollout_id for each in result.rollouts if each.failure and "Error" in each.failure)
        capsys.readouterr()
        assert len(commands(lesson)) > 1
        for command in commands(lesson):
            assert main(shlex.split(command.replace("ROLLOUT", crashed))[1:]) == 0
        shown = capsys.readouterr().out
        assert expected in shown
        assert crashed in shown


def test_the_node_with_a_collector_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program makes its Trainer in the same way; with the page's other address nothing is reported."""
    if importlib.util.find_spec("grpc") is not None:
        pytest.skip("gRPC is installed")
    shown, repaired = blocks(CONFIGURATIONS, "bash")[-2:]
    assert shown.startswith(OF_THE_DOCUMENTS)
    for name, value in re.findall(r'^export (\w+)="?([^"\n]+)"?$', shown, re.M):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AGL_EMITTER_DEBUG")
    with pytest.raises(MissingExtraError) as caught:
        agl.Trainer()
    assert f"{caught.type.__name__}: {caught.value}" == blocks(CONFIGURATIONS, "text")[-1].strip()
    [(name, value)] = re.findall(r'^export (\w+)="([^"\n]+)"$', repaired, re.M)
    monkeypatch.setenv(name, value)
    assert agl.Trainer().port is None


@pytest.mark.heavy
def test_the_roles_of_the_lesson_on_scaling_out(tmp_path: Path, terminal: Terminal) -> None:
    """Its first program as `train.py` in two processes, with the page's variables; only the address differs."""
    (tmp_path / "train.py").write_text(blocks(page_of("4-scale-out"))[0])
    port = str(free_port())
    own = {"AGL_TOKEN": "a-token-for-this-test-alone", "PYTHONPATH": os.pathsep.join(sys.path)}
    machines: list[tuple[Process, str]] = []
    for block in blocks(page_of("4-scale-out"), "console"):
        variables = dict(re.findall(r"(AGL_(?!TOKEN)\w+)=(\S+)", block))
        assert set(variables) == {"AGL_CURRENT_ROLE", "AGL_SERVER_HOST", "AGL_SERVER_PORT"}
        variables |= {"AGL_SERVER_HOST": "127.0.0.1", "AGL_SERVER_PORT": port}
        machine = terminal("python train.py", apart=True, **{**own, **variables})
        machines.append((machine, block.strip().splitlines()[-1]))
    assert len(machines) == 2
    for machine, expected in machines:
        assert machine.succeeded().strip() == expected, machine.errors
