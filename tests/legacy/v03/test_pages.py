"""The page on moving over: its programs run one after the other, and its table is what the command prints."""

from __future__ import annotations

from pathlib import Path

from tests.legacy.v03.older import older, unfinished, write_dump
from tests.pages import blocks
from tests.stubs.processes import run_program

PAGE = "how-to/move-from-v03.md"


def test_the_program_runs_before_and_after(tmp_path: Path) -> None:
    before, after = blocks(PAGE)
    outputs: list[str] = []
    for number, program in enumerate((before, before[: before.index("@agl.algo")] + after)):
        (tmp_path / f"program{number}.py").write_text(program)
        outputs.append(run_program("python", f"program{number}.py", folder=tmp_path).stdout.strip())
    assert outputs[0] == blocks(PAGE, "text")[1].strip()
    assert outputs[1].splitlines()[-1] == "'Think carefully: {q}': 1.0 of 2 scored, 0 excluded"
    assert (tmp_path / "agl.db").is_file()


def test_the_table_is_what_the_command_prints(tmp_path: Path) -> None:
    made = older()
    unfinished(made)
    dump = write_dump(tmp_path / "dump", made)
    done = run_program("agl", "import-v03", dump, "--store", tmp_path / "new.db", code=None)
    written, printed = (
        [" ".join(line.split()) for line in text.splitlines()] for text in (blocks(PAGE, "text")[0], done.stdout)
    )
    assert len(written) == len(printed)
    for shown, line in zip(written, printed, strict=True):
        whole, cut, _ = shown.partition(", ...")
        assert line.startswith(whole) if cut else line == shown
