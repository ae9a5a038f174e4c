"""The tutorials: each program runs, top to bottom, and prints what stands beside it; so do their commands.

A program whose first line says that the documents have it so ends with the error that stands below it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.cli import main
from agentlightning.errors import MissingExtraError
from tests.stubs.ports import free_port

LESSONS = Path(__file__).parents[2] / "docs/tutorials"
OF_THE_DOCUMENTS = "# as the documents have it\n"
TRAINS = pytest.param("3-train-weights", marks=pytest.mark.heavy)


def blocks_of(lesson: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (LESSONS / f"{lesson}.md").read_text(), re.S | re.M)


def run(lesson: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[types.ModuleType, str]:
    """Run the programs of a lesson one after another in a folder; return their module and what they printed."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("AGL_TOKEN", raising=False)
    module, shown = types.ModuleType("lesson"), io.StringIO()
    monkeypatch.setitem(sys.modules, "lesson", module)
    outputs = iter(blocks_of(lesson, "text"))
    for number, block in enumerate(blocks_of(lesson, "python")):
        code = compile(block, f"{lesson}, program {number}", "exec")
        with contextlib.redirect_stdout(shown):
            if not block.startswith(OF_THE_DOCUMENTS):
                exec(code, module.__dict__)
                continue
            with pytest.raises(Exception) as caught:  # noqa: PT011 -- the page says which
                exec(code, module.__dict__)
            assert f"{caught.type.__name__}: {caught.value}" == next(outputs).strip()
    return module, shown.getvalue()


@pytest.mark.parametrize("lesson", ["1-first-agent", "2-tune-a-prompt", TRAINS, "4-scale-out", "5-debug-a-run"])
def test_the_programs_of_a_lesson_print_what_it_says(
    lesson: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openai", reason="openai is not installed (the extra demo has it)")
    _, shown = run(lesson, monkeypatch, tmp_path)
    notes = [
        text for block in blocks_of(lesson, "python") for text in re.findall(r"^print\(.*\)  # (.+)$", block, re.M)
    ]
    lines = shown.splitlines()
    assert notes
    for expected in notes:
        pattern = re.escape(expected).replace(re.escape("..."), ".*")
        assert any(re.fullmatch(pattern, line.rstrip()) for line in lines), f"{expected!r} in {shown}"


def commands(lesson: str) -> list[str]:
    return [line for block in blocks_of(lesson, "bash") for line in block.splitlines() if line.startswith("agl ")]


def test_the_commands_of_the_lessons_show_the_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for lesson, expected in (("1-first-agent", "KeyError: 'figs'"), ("5-debug-a-run", "ZeroDivisionError")):
        folder = tmp_path / lesson
        folder.mkdir()
        module, _ = run(lesson, monkeypatch, folder)
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
    shown, repaired = blocks_of("4-scale-out", "bash")[-2:]
    assert shown.startswith(OF_THE_DOCUMENTS)
    for name, value in re.findall(r'^export (\w+)="?([^"\n]+)"?$', shown, re.M):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AGL_EMITTER_DEBUG")
    with pytest.raises(MissingExtraError) as caught:
        agl.Trainer()
    assert f"{caught.type.__name__}: {caught.value}" == blocks_of("4-scale-out", "text")[-1].strip()
    [(name, value)] = re.findall(r'^export (\w+)="([^"\n]+)"$', repaired, re.M)
    monkeypatch.setenv(name, value)
    assert agl.Trainer().port is None


@pytest.mark.heavy
def test_the_roles_of_the_lesson_on_scaling_out(tmp_path: Path) -> None:
    """Its first program as `train.py` in two processes, with the page's variables; only the address differs."""
    (tmp_path / "train.py").write_text(blocks_of("4-scale-out", "python")[0])
    port = str(free_port())
    own = {"AGL_TOKEN": "a-token-for-this-test-alone", "PYTHONPATH": os.pathsep.join(sys.path)}
    machines: list[tuple[subprocess.Popen[str], str]] = []
    for block in blocks_of("4-scale-out", "console"):
        variables = dict(re.findall(r"(AGL_(?!TOKEN)\w+)=(\S+)", block))
        assert set(variables) == {"AGL_CURRENT_ROLE", "AGL_SERVER_HOST", "AGL_SERVER_PORT"}
        variables |= {"AGL_SERVER_HOST": "127.0.0.1", "AGL_SERVER_PORT": port}
        machine = subprocess.Popen(
            [sys.executable, "train.py"], cwd=tmp_path, env={**os.environ, **own, **variables},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        machines.append((machine, block.strip().splitlines()[-1]))
    assert len(machines) == 2
    try:
        for machine, expected in machines:
            output, complained = machine.communicate(timeout=60)
            assert (machine.returncode, output.strip()) == (0, expected), complained
    finally:
        for machine, _ in machines:
            machine.kill()
