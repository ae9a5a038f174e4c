"""The page on moving over: its programs run one after the other, and its table is what the command prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.legacy.v03.older import older, unfinished, write_dump

PAGE = Path(__file__).parents[3] / "docs/how-to/move-from-v03.md"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_the_program_runs_before_and_after(tmp_path: Path) -> None:
    before, after = _blocks("python")
    prefix = before[: before.index("@agl.algo")]
    for number, program in enumerate((before, prefix + after)):
        (tmp_path / f"program{number}.py").write_text(program)
        done = subprocess.run(
            [sys.executable, f"program{number}.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        if number == 0:
            assert "\n".join(lines) == _blocks("text")[1].strip()
        else:
            assert lines[-1] == "'Think carefully: {q}': 1.0 of 2 scored, 0 left out"
    assert (tmp_path / "agl.db").is_file()


def test_the_table_is_what_the_command_prints(tmp_path: Path) -> None:
    made = older()
    unfinished(made)
    command = [sys.executable, "-m", "agentlightning.cli", "import-v03", str(write_dump(tmp_path / "dump", made))]
    done = subprocess.run([*command, "--store", str(tmp_path / "new.db")], capture_output=True, text=True, timeout=120)
    written, printed = (
        [" ".join(line.split()) for line in text.splitlines()] for text in (_blocks("text")[0], done.stdout)
    )
    assert len(written) == len(printed)
    for shown, line in zip(written, printed, strict=True):
        whole, cut, _ = shown.partition(", ...")
        assert line.startswith(whole) if cut else line == shown
