"""Every page of `agl`: an example that parses, near misses, completion, no colours in a pipe, errors that tell."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from agentlightning.cli import main
from agentlightning.cli.main import COMMANDS, load
from tests.cli.terminal import shell
from tests.stubs.processes import run_program


def pages() -> Iterator[tuple[str, ...]]:
    """Yield every command that has a page, as one types it."""
    for name in COMMANDS:
        yield (name,)
        yield from ((name, below) for below in getattr(load(name), "commands", {}))


@pytest.mark.parametrize("command", [p for p in pages() if p != ("vllm",)], ids=" ".join)
def test_each_page_has_an_example_that_the_command_line_understands(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert main([*command, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    [example] = re.findall(r"Example: ((?:[A-Z_]+=\S+ )?agl [^│╭]+?)(?= [╭│]|$)", shown)
    words = shlex.split(example.partition(",")[0])
    words = words[words.index("agl") + 1 :]
    assert command[-1] in words or command == ("run", "start")
    loaded: Any = load(words[0])
    loaded.make_context(words[0], words[1:], resilient_parsing=False).close()


def test_the_line_of_each_command_on_the_first_page_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) in (0, 2)
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in COMMANDS if not re.search(rf"│ {name} ", shown)] == []


def test_the_first_page_imports_no_command() -> None:
    program = """
import sys
from agentlightning.cli import main
main(["--help"])
print([name for name in sys.modules if name.startswith("agentlightning.")])
"""
    loaded = run_program("python", "-c", program).stdout.splitlines()[-1]
    assert "agentlightning.cli.main" in loaded
    for name in ("agentlightning.cli.store", "agentlightning.store", "agentlightning.types"):
        assert f"'{name}'" not in loaded


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["stroe"], "Did you mean 'store'"),
        (["rollouts", "lst"], "Did you mean 'list'"),
        (["rollouts", "list", "--statis", "failed"], "--status"),
        (["--debg"], "--debug"),
    ],
)
def test_a_near_miss_is_told_the_right_word(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert text in capsys.readouterr().err


def test_a_shell_completes_commands_and_options() -> None:
    def completed(words: str) -> list[str]:
        asked = {"_AGL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        return run_program("agl", code=None, **asked).stdout.split()

    assert completed("agl ro") == ["rollouts"]
    assert "retry" in completed("agl rollouts re")
    assert completed("agl workers --li") == ["--limit"]


def test_a_pipe_gets_no_colours() -> None:
    assert "\x1b" not in shell("rollouts", "--help", NO_COLOR="").stdout


@pytest.mark.parametrize("variable", ["--debug", "AGL_DEBUG"])
def test_an_unforeseen_error_is_one_line_and_its_traceback_comes_when_asked_for(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise LookupError("no such thing")

    monkeypatch.setattr("agentlightning.cli.doctor.run_checks", broken)
    assert main(["doctor"]) == 70
    [line] = capsys.readouterr().err.splitlines()
    assert line == "agl: unexpected LookupError: no such thing. Run `agl --debug ...` to see the traceback."
    if variable == "AGL_DEBUG":
        monkeypatch.setenv("AGL_DEBUG", "1")
    assert main(["--debug", "doctor"] if variable == "--debug" else ["doctor"]) == 70
    assert "in broken" in capsys.readouterr().err


def test_a_reader_that_has_read_enough_is_no_error() -> None:
    command = f"{shlex.quote(sys.executable)} -m agentlightning.cli doctor --json | head -c 1"
    done = run_program("bash", "-c", command, code=None)
    assert (done.stdout, done.stderr) == ("[", "")


def test_every_command_is_a_function_or_an_app_of_typer() -> None:
    assert all(isinstance(load(name), typer.core.TyperCommand | typer.core.TyperGroup) for name in COMMANDS)
