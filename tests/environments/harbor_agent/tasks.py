"""Makes tasks in Harbor's format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

TOML = """version = "1.0"
[agent]
timeout_sec = 60
[verifier]
timeout_sec = 30
[environment]
"""
TEST = """#!/bin/bash
cd /app
if python3 -c "import calc; assert calc.mul(6, 7) == 42"; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
SOLUTION = """#!/bin/bash
printf 'def mul(a, b):\\n    return a * b\\n' > /app/calc.py
"""
FILES = {
    "task.toml": TOML,
    "instruction.md": "Mend the function mul in /app/calc.py, so that it multiplies.\n",
    "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\nCOPY calc.py .\n",
    "environment/calc.py": "def mul(a, b):\n    return a + b\n",
    "tests/test.sh": TEST,
    "solution/solve.sh": SOLUTION,
}


def make_task(folder: Path, changed: Mapping[str, str | None] | None = None) -> Path:
    """Write a task about a function that does not multiply. `changed` replaces files; None removes one."""
    for name, text in {**FILES, **(changed or {})}.items():
        if text is not None:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return folder
