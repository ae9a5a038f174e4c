"""examples/room_selector: both searches find all that the prompt forgets, and the gain holds on unseen requests."""

from __future__ import annotations

import re

import pytest

from tests.examples.shown import run

pytestmark = pytest.mark.heavy


@pytest.mark.parametrize("method", ["apo", "gepa"])
def test_a_search_finds_what_the_prompt_forgets(method: str) -> None:
    printed = run(f"python examples/room_selector/tune.py --method {method}")
    assert f"--- {method}: " in printed
    before, after = re.findall(r"^(?:before|after) +([\d.]+) \[([\d.]+), ([\d.]+)\]", printed, re.MULTILINE)
    assert before == ("0.60", "0.51", "0.68")
    assert float(after[1]) > float(before[2]), "the intervals are apart"
    assert "\nbetter: " in printed
    assert "0 lost of 112 pairs" in printed
