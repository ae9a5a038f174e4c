"""Statements of the documents beside their programs: a row for each sentence, entry of a list or line of a table.

`statements/NNN.md` holds those of one document in its order: headings of the document, and below each a table with the
statement in a few words, its verdict (`as written`, `differs: ...` or `write this instead: ...`) and the tests that
assert it, as `<path below tests/>::<function>`, divided by commas. A row whose verdict is `write this instead` may have
none where there is nothing to run. `make documents` writes docs/reference/documents.md again.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.seeds.shown import AS_WRITTEN, DIFFERS, INSTEAD

TESTS = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / "statements"


@dataclass(frozen=True)
class Statement:
    """One row: document `000`, heading, words, verdict, tests."""

    document: str
    place: str
    words: str
    verdict: str
    tests: tuple[str, ...]


@cache
def statements() -> tuple[Statement, ...]:
    """Return all statements, in the order of the documents."""
    return tuple(statement for path in sorted(FOLDER.glob("*.md")) for statement in _statements(path))


def _statements(path: Path) -> list[Statement]:
    rows: list[Statement] = []
    place = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            place = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith(("| statement |", "| --- |")):
            words, verdict, tests = [cell.strip() for cell in line[2:].removesuffix("|").split(" | ")]
            rows.append(Statement(path.stem, place, words, verdict, tuple(re.findall(r"[\w/]+\.py::\w+", tests))))
    return rows


def complaints(statement: Statement) -> list[str]:
    """Return what is wrong with a row: an unknown verdict, no test, or a test that there is not."""
    is_instead = statement.verdict.startswith(f"{INSTEAD}: ")
    messages: list[str] = []
    if statement.verdict != AS_WRITTEN and not is_instead and not statement.verdict.startswith(f"{DIFFERS}: "):
        messages.append(f"{statement.verdict!r} is no verdict")
    if not statement.tests and not is_instead:
        messages.append("no test asserts it")
    return messages + [f"there is no test {test}" for test in statement.tests if not _exists(test)]


def _exists(test: str) -> bool:
    path, _, name = test.partition("::")
    return (TESTS / path).exists() and name in _functions(path)


@cache
def _functions(path: str) -> frozenset[str]:
    body = ast.parse((TESTS / path).read_text(encoding="utf-8")).body
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
