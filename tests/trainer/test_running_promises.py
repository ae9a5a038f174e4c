"""The table of what a run does better names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROMISES = re.findall(
    r"^\| (\d+) \| (.+) \| (.+) \| (.+) \|$", (ROOT / "docs/deep-dive/running-promises.md").read_text(), re.MULTILINE
)


def test_the_table_has_every_point_once_in_order() -> None:
    assert [int(number) for number, *_ in PROMISES] == list(range(1, 33))


def test_every_point_names_a_test() -> None:
    assert [row for row in PROMISES if not re.search(r"`tests/[\w/]+\.py::\w+`", row[3])] == []
