"""The table of what a run does better names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROMISES = re.findall(
    r"^\| (\d+) \| (.+) \| (.+) \| (.+) \|$", (ROOT / "docs/deep-dive/running-promises.md").read_text(), re.MULTILINE
)


def test_the_table_has_every_point_once_in_order() -> None:
    assert [int(number) for number, *_ in PROMISES] == list(range(1, 33))


@pytest.mark.parametrize("shown", [row[3] for row in PROMISES], ids=[row[0] for row in PROMISES])
def test_a_point_is_shown_by_a_test_that_exists(shown: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", shown)
    assert named
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"
