"""The lines of `metrics.jsonl`, read back by a run that goes on: each step is to be there once."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agentlightning.private_files import open_private
from agentlightning.training.progress import StepFigures

_FIELDS = frozenset(field.name for field in dataclasses.fields(StepFigures))


def read_lines(path: Path) -> dict[int, dict[str, Any]]:
    """Return the lines by step. A line that was cut when its process was killed is left out."""
    lines: dict[int, dict[str, Any]] = {}
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return lines
    for line in content.split(b"\n"):
        try:
            figures = json.loads(line)
            lines[int(figures["step"])] = figures
        except (ValueError, KeyError, TypeError):
            continue
    return lines


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Replace the file by these lines, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    with open_private(temporary, "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def figures_of(line: Mapping[str, Any]) -> StepFigures:
    """Return a line as the figures that it was written from."""
    return StepFigures(**{name: value for name, value in line.items() if name in _FIELDS})
