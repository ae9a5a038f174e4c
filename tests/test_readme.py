"""The README is correct: its program runs as printed, and every make target that a document names exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from tests.pages import ROOT, blocks
from tests.stubs.processes import clean_environment, run_program
from tests.test_documents import each_document


def program() -> str:
    """Return the one Python block of the README."""
    [block] = blocks(ROOT / "README.md")
    return block


def code_of(document: Path) -> str:
    """Return what a document prints as code, in blocks and within lines."""
    text = document.read_text()
    fenced = re.findall(r"^```.*?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    return "\n".join((*fenced, *spans))


def test_the_program_of_the_readme_runs_exactly_as_printed(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(program())
    done = run_program("python", script, folder=tmp_path, environment=clean_environment())
    assert done.stdout == "2 rollouts (2 scored), mean reward 1.000\n", done.stderr
    assert list(tmp_path.iterdir()) == [script], "it leaves no file behind"


def test_the_program_of_the_readme_has_ten_lines_at_most() -> None:
    assert len([line for line in program().splitlines() if line.strip()]) <= 10


@each_document
def test_every_make_target_and_variable_that_a_document_names_is_in_the_makefile(document: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    commands = re.findall(r"^(?:\$ )?make ([a-z][\w-]*)((?: [A-Z_]+=)*)", code_of(document), re.MULTILINE)
    assert {target for target, _ in commands} <= targets
    variables = {name for _, arguments in commands for name in re.findall(r"[A-Z_]+", arguments)}
    assert variables <= set(re.findall(r"\$\(([A-Z_]+)\)", makefile))


def test_the_page_on_installation_names_every_extra_and_no_other() -> None:
    text = (ROOT / "docs/how-to/install.md").read_text()
    table = text[text.index("| extra |") :].split("\n\n")[0]
    named = {name for line in table.splitlines()[2:] for name in re.findall(r"`([\w-]+)`", line.split("|")[1])}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert named == set(extras)


def test_the_two_commands_of_the_first_screen_are_there() -> None:
    first_block = blocks(ROOT / "README.md", "bash")[0]
    assert re.findall(r"^make ([\w-]+)", first_block, re.MULTILINE) == ["demo", "test"]


def test_make_clean_removes_every_environment_that_a_target_makes() -> None:
    makefile = (ROOT / "Makefile").read_text()
    made = set(re.findall(r"(?:-m venv|\(MADE_BY_UV\)) (\S+)", makefile))
    removed = makefile[makefile.index("\nclean:") :].split()
    assert made <= set(removed), f"clean leaves {sorted(made - set(removed))}"
