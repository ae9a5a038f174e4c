"""The commands that the READMEs of examples/ show, each with the output that it is said to have."""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RECIPES = ROOT / "contrib/recipes"
_SHOWN = re.compile(r"^```bash\n([^`]*?)\n```\n\n```text\n(.*?)^```", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"(-?\d+\.\d+)")


@dataclass(frozen=True)
class Shown:
    """One command of a README."""

    name: str
    command: str
    output: str


def shown(*examples: str) -> list[Shown]:
    """Return the commands, in their order, of those examples that show their output."""
    found: list[Shown] = []
    for name in examples:
        blocks: list[tuple[str, str]] = _SHOWN.findall((EXAMPLES / name / "README.md").read_text())
        assert blocks, f"examples/{name}/README.md shows no command with its output"
        found.extend(Shown(f"{name}-{number}", *block) for number, block in enumerate(blocks))
    return found


def run(command: str, folder: Path = ROOT, *, timeout: float = 110, **environment: str) -> str:
    """Run a command that begins with `python`, without settings of this machine; return its standard output."""
    program, *arguments = shlex.split(command)
    assert program == "python", command
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("AGL_", "OPENAI_"))}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def same(printed: str, expected: str, *, tolerance: float = 0.0) -> bool:
    """True if both say the same, but for spaces at ends of lines and for decimal numbers within the tolerance."""
    left, right = (_NUMBER.split("\n".join(map(str.rstrip, text.strip().splitlines()))) for text in (printed, expected))
    if left[::2] != right[::2]:
        return False
    return all(
        math.isclose(float(a), float(b), abs_tol=tolerance) for a, b in zip(left[1::2], right[1::2], strict=True)
    )
