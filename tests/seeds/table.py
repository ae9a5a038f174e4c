"""The page on the documents, docs/reference/documents.md: programs by the outcomes of their tests, and statements."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

from tests.seeds.shown import AS_WRITTEN, DIFFERS, INSTEAD, Document, Snippet, documents
from tests.seeds.statements import Statement, statements

PAGE = Path(__file__).parents[2] / "docs/reference/documents.md"
WRITES = "WRITE_DOCUMENTS"
"""Variable of the environment that lets the tests write the page in the place of comparing it."""
NOT_TRIED = "not tried"

_HEAD = """# Snippets of the v0.3 documentation

This page shows which programs and statements of the older documentation work here. Five documents describe the
programming model. Each of their programs, and each testable statement of their sentences, lists and tables, has one of
these verdicts:

- **as written**: it works unchanged. A test adds only what the text around a program provides: imports, names, and
  indentation that is missing in the page.
- **differs**: it works with the change in the note: a port of the test, a token that a server beyond this machine
  requires, or a word that is accepted for another.
- **write this instead**: two documents contradict each other, a version has reached its end, or the text refers to
  internals of another project. The error or the note has the replacement.

| Document | Programs as written | Differ | Write instead | Statements as written | Differ | Write instead |
| --- | --- | --- | --- | --- | --- | --- |
{totals}

Each row has the test that checks it, as a path below `tests/`; paths without a folder are in `tests/seeds`. To generate
this page, run `make documents`. [Migration](migration.md) describes the other changes since v0.3.
"""
_HEADINGS = {INSTEAD: "Write this instead", DIFFERS: "Differs", AS_WRITTEN: "As written", NOT_TRIED: "Not tried"}
_COLUMNS = ["| Program or statement | Section | Note | Test |", "| --- | --- | --- | --- |"]


def outcomes() -> dict[str, str]:
    """Return the outcomes of the page by the ids of their snippets."""
    lines = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    verdicts_by_id, number, verdict = dict[str, str](), "", ""
    verdicts = {heading: verdict for verdict, heading in _HEADINGS.items()}
    for line in lines:
        if line.startswith("### "):
            verdict = verdicts[line.removeprefix("### ")]
        elif line.startswith("## "):
            number = line.split()[1].rstrip(":")
        elif line.startswith("| program "):
            name, _, note, _ = re.split(r" (?<!\\)\| ", line.removeprefix("| program "))
            verdicts_by_id[f"{number}/{name}"] = f"{verdict}{_between(verdict) if note else ''}{note}"
    return verdicts_by_id


def cell(outcome: str) -> str:
    return outcome.replace("|", "\\|")


def page(verdicts: dict[str, str]) -> str:
    """Return the page with these outcomes; a snippet without one was not tried."""
    every = {snippet.id: verdicts.get(snippet.id, NOT_TRIED) for one in documents() for snippet in one.snippets}
    counts = [_counts(document, every) for document in documents()]
    names = [*(f"{document.number}: {document.title}" for document in documents()), "All"]
    counts.append([sum(column) for column in zip(*counts, strict=True)])
    totals = [" | ".join([f"| {name}", *map(str, count)]) + " |" for name, count in zip(names, counts, strict=True)]
    sections = [_section(document, every) for document in documents()]
    return "\n".join([_HEAD.format(totals="\n".join(totals)), *sections])


def write(snippet: Snippet, outcome: str) -> None:
    PAGE.write_text(page(outcomes() | {snippet.id: cell(outcome)}), encoding="utf-8")


def _counts(document: Document, every: dict[str, str]) -> list[int]:
    programs = Counter(_verdict(every[snippet.id]) for snippet in document.snippets)
    statement_counts = Counter(_verdict(statement.verdict) for statement in _of(document))
    return [count[verdict] for count in (programs, statement_counts) for verdict in (AS_WRITTEN, DIFFERS, INSTEAD)]


def _section(document: Document, every: dict[str, str]) -> str:
    tests = _snippet_tests()
    rows = [(f"program {one.name}", one.place, every[one.id], (tests[one.id],)) for one in document.snippets]
    rows += [(statement.words, statement.place, statement.verdict, statement.tests) for statement in _of(document)]
    parts = [f"## {document.number}: {document.title}", ""]
    for verdict, heading in _HEADINGS.items():
        if chosen := [_line(*row) for row in rows if _verdict(row[2]) == verdict]:
            parts += [f"### {heading}", "", *_COLUMNS, *chosen, ""]
    return "\n".join([*parts, *([f"Excluded: {document.left_out}", ""] if document.left_out else [])])


def _line(words: str, place: str, outcome: str, tests: tuple[str, ...]) -> str:
    verdict = _verdict(outcome)
    note = outcome.removeprefix(verdict).removeprefix(_between(verdict))
    names = ", ".join(f"`{test.removeprefix('seeds/')}`" for test in tests)
    return f"| {words} | {place} | {note} | {names} |"


def _verdict(outcome: str) -> str:
    return next(verdict for verdict in _HEADINGS if outcome.startswith(verdict))


def _between(verdict: str) -> str:
    """Return what stands between a verdict and its note."""
    return "; " if verdict == AS_WRITTEN else ": "


def _of(document: Document) -> list[Statement]:
    return [statement for statement in statements() if statement.document == document.number]


@cache
def _snippet_tests() -> dict[str, str]:
    """Return the test of each snippet, by its mark."""
    marked = re.compile(r"^@pytest\.mark\.snippet\(\s*\"([\w/-]+)\".*?^(?:async )?def (\w+)", re.MULTILINE | re.DOTALL)
    return {
        name: f"seeds/{path.name}::{function}"
        for path in sorted(Path(__file__).parent.glob("test_*.py"))
        for name, function in marked.findall(path.read_text(encoding="utf-8"))
    }
