"""The budget of lines: how large each package is, against what `shape.toml` allows it.

`python -m tests.packaging.shape` (`make shape`) prints the table and ends with status 1 if a package has more lines or
files than its budget. All lines of `*.py` count. A budget is raised only with a line in `docs/deep-dive/decisions.md`
that names what was deleted for it; whoever makes a package smaller lowers its budget in the same commit.
"""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Size:
    """Lines and files of a folder, or what it may have."""

    lines: int
    files: int


def sizes(folders: list[str], root: Path = ROOT) -> dict[str, Size]:
    lines = {folder: [file.read_bytes().count(b"\n") for file in (root / folder).rglob("*.py")] for folder in folders}
    return {folder: Size(sum(counts), len(counts)) for folder, counts in lines.items()}


def budgets(root: Path = ROOT) -> dict[str, Size]:
    """Return the budget of each folder.

    Raises:
        ValueError: an entry of `shape.toml` is not `{ lines = ..., files = ... }`.
    """
    read = tomllib.loads((root / "shape.toml").read_text())
    for folder, entry in read.items():
        if not isinstance(entry, dict) or entry.keys() != {"lines", "files"}:
            raise ValueError(f"shape.toml: {folder!r} must be {{ lines = 100, files = 10 }}; got {entry!r}")
    return {folder: Size(entry["lines"], entry["files"]) for folder, entry in read.items()}


def main(root: Path = ROOT) -> int:
    """Print the table; return 1 if a folder is above its budget."""
    allowed = budgets(root)
    over = False
    print(f"{'folder':34} {'lines':>7} {'budget':>7} {'files':>6} {'budget':>7}")
    for folder, size in sizes(list(allowed), root).items():
        budget = allowed[folder]
        above = size.lines > budget.lines or size.files > budget.files
        over |= above
        mark = "  above its budget" if above else ""
        print(f"{folder:34} {size.lines:7,} {budget.lines:7,} {size.files:6,} {budget.files:7,}{mark}")
    if over:
        print(
            "Delete what is not needed, or raise the budget in shape.toml with a line in docs/deep-dive/decisions.md."
        )
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
