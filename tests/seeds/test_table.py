"""The page on the documents' snippets is complete, and each snippet has its test."""

from __future__ import annotations

import re
from pathlib import Path

from tests.seeds import table
from tests.seeds.shown import snippets


def test_each_snippet_has_one_test() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("test_*.py")))
    tested = re.findall(r"^@pytest\.mark\.snippet\(\s*\"([\w/-]+)\"", sources, re.MULTILINE)
    assert sorted(tested) == sorted(snippets())


def test_the_page_holds_each_snippet_in_order_with_its_outcome() -> None:
    assert table.PAGE.read_text(encoding="utf-8") == table.page(table.rows()), "`make documents` writes the page again"
    assert list(table.rows()) == list(snippets())
    assert table.NOT_TRIED not in table.PAGE.read_text(encoding="utf-8")
