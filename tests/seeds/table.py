"""The page on the documents' snippets, docs/reference/documents.md: made of what the tests found, row by row."""

from __future__ import annotations

from pathlib import Path

from tests.seeds.shown import Document, Snippet, documents

PAGE = Path(__file__).parents[2] / "docs/reference/documents.md"
WRITES = "WRITE_DOCUMENTS"
"""Variable of the environment that lets the tests write the page in the place of comparing it."""
NOT_TRIED = "not tried"

_HEAD = """# The documents' snippets

Five documents describe the programming model. Their programs are run word for word by the tests in `tests/seeds`; only
what the text around them gives is added: imports, names, and the indentation that a page lost. A snippet that
contradicts another one, or names something that there is not, ends in an error that says what to write.

This page is made by those tests: `make documents` writes it again.

{totals}
"""


def row(snippet: Snippet, outcome: str) -> str:
    """Return the line of the table for a snippet."""
    return f"| {snippet.name} | {snippet.place} | {outcome.replace('|', chr(92) + '|')} |"


def rows() -> dict[str, str]:
    """Return the rows of the page by the ids of their snippets."""
    lines = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    found, number = dict[str, str](), ""
    for line in lines:
        if line.startswith("## "):
            number = line.split()[1].rstrip(":")
        elif line.startswith("| ") and not line.startswith(("| snippet |", "| --- |")):
            found[f"{number}/{line.split(' | ')[0].removeprefix('| ')}"] = line
    return found


def page(found: dict[str, str]) -> str:
    """Return the page with these rows; a snippet without one was not tried."""
    every = {
        snippet.id: found.get(snippet.id, row(snippet, NOT_TRIED))
        for document in documents()
        for snippet in document.snippets
    }
    outcomes = [line.split(" | ")[2] for line in every.values()]
    ran, said = (sum(outcome.startswith(word) for outcome in outcomes) for word in ("runs", "says"))
    totals = f"{len(every)} snippets: {ran} run, {said} say what to write."
    return "\n".join([_HEAD.format(totals=totals), *(_section(document, every) for document in documents())])


def _section(document: Document, every: dict[str, str]) -> str:
    lines = [every[snippet.id] for snippet in document.snippets]
    table = ["| snippet | place | outcome |", "| --- | --- | --- |", *lines]
    left_out = [f"Left out: {document.left_out}", ""] if document.left_out else []
    return "\n".join([f"## {document.number}: {document.title}", "", *table, "", *left_out])


def write(snippet: Snippet, outcome: str) -> None:
    """Write the page again with this row in it."""
    PAGE.write_text(page(rows() | {snippet.id: row(snippet, outcome)}), encoding="utf-8")
