"""examples/own_runner: its output, and that the folders are removed."""

from __future__ import annotations

from pathlib import Path

from tests.examples.shown import run, same, shown


def test_the_program_prints_what_its_readme_shows_and_leaves_no_folder(tmp_path: Path) -> None:
    [one] = shown("own_runner")
    printed = run(one.command, TMPDIR=str(tmp_path))
    assert same(printed, one.output), printed
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("ro-")] == []
