"""Tasks for a small model: count the words, lines or characters of a file whose name only `ls` shows."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Part = Literal["train", "held_out", "shown"]

SYSTEM: Final = "Use bash."
"""The system prompt of the harness."""
FLAGS: Final = {"words": "w", "lines": "l", "characters": "c"}
FIRST: Final = "red blue green brown small large old new cold warm quiet loud round flat dark light"
SECOND: Final = "lamp chair stone river tree boat apple horse window garden letter bridge cloud coat drum fox"
"""Words of file names, separated by spaces."""
_TEXT: Final = "a rollout is one run of an agent on one task and the store keeps its spans"

_CONFIG: Final = """version = "1.0"

[agent]
timeout_sec = 120

[verifier]
timeout_sec = 30

[environment]
cpus = 1
memory_mb = 1024
"""
_VERIFIER: Final = """#!/bin/bash
if [ "$(tr -d '[:space:]' < /app/count.txt)" = {answer} ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@dataclass(frozen=True)
class Task:
    """What is counted, and in which file."""

    unit: str
    """A key of FLAGS."""
    file: str
    text: str

    @property
    def instruction(self) -> str:
        return f"Write the number of {self.unit} in the text file to count.txt."

    @property
    def command(self) -> str:
        """The command that solves the task."""
        return f"wc -{FLAGS[self.unit]} < {self.file} > count.txt"

    @property
    def answer(self) -> int:
        counts = {"words": len(self.text.split()), "lines": self.text.count("\n"), "characters": len(self.text)}
        return counts[self.unit]


def draw(part: Part, rng: random.Random) -> Task:
    """Return a task of one part. No file name occurs in two parts."""
    while True:
        file = f"{rng.choice(FIRST.split())}-{rng.choice(SECOND.split())}.txt"
        place = zlib.crc32(file.encode()) % 10
        if part == ("train" if place < 4 else "held_out" if place < 6 else "shown"):
            break
    lines = (" ".join(rng.choices(_TEXT.split(), k=rng.randint(2, 6))) for _ in range(rng.randint(2, 9)))
    return Task(rng.choice(list(FLAGS)), file, "".join(f"{line}\n" for line in lines))


def write_tasks(part: Part, count: int, folder: Path, seed: int = 0) -> list[str]:
    """Write tasks in Harbor's format, and return their folders."""
    rng = random.Random(f"{part} {seed}")
    folders: list[str] = []
    for number in range(count):
        task, place = draw(part, rng), folder / part / f"count-{number}"
        files = {
            "task.toml": _CONFIG,
            "instruction.md": task.instruction,
            f"environment/{task.file}": task.text,
            "environment/Dockerfile": f"FROM debian:12-slim\nWORKDIR /app\nCOPY {task.file} .\n",
            "tests/test.sh": _VERIFIER.format(answer=task.answer),
            "solution/solve.sh": f"#!/bin/bash\ncd /app\n{task.command}\n",
        }
        for name, text in files.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text)
        folders.append(str(place))
    return folders
