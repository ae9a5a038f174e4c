"""The page on the documents is complete, and each row has its test."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.seeds import table
from tests.seeds.shown import snippets
from tests.seeds.statements import Statement, complaints, statements


def test_each_snippet_has_one_test() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("test_*.py")))
    tested = re.findall(r"^@pytest\.mark\.snippet\(\s*\"([\w/-]+)\"", sources, re.MULTILINE)
    assert sorted(tested) == sorted(snippets())


def test_each_statement_has_a_verdict_and_tests_that_there_are() -> None:
    complaints_by_words = {statement.words: complaints(statement) for statement in statements()}
    assert {words: wrong for words, wrong in complaints_by_words.items() if wrong} == {}
    twice = Counter((statement.document, statement.place, statement.words) for statement in statements())
    assert max(twice.values()) == 1


@pytest.mark.parametrize(
    ("verdict", "tests", "complaint"),
    [
        ("holds", ("seeds/test_table.py::test_each_snippet_has_one_test",), "'holds' is no verdict"),
        ("as written", (), "no test asserts it"),
        ("differs: a port", ("seeds/test_table.py::test_of_nothing",), "there is no test"),
        ("as written", ("seeds/no_file.py::test_of_nothing",), "there is no test"),
    ],
)
def test_what_is_wrong_with_a_row_is_said(verdict: str, tests: tuple[str, ...], complaint: str) -> None:
    [message] = complaints(Statement("000", "a heading", "some words", verdict, tests))
    assert complaint in message


def test_the_page_holds_each_snippet_and_statement_with_its_outcome() -> None:
    written = table.PAGE.read_text(encoding="utf-8")
    assert written == table.page(table.outcomes()), "`make documents` writes the page again"
    assert set(table.outcomes()) == set(snippets())
    assert table.NOT_TRIED not in written
