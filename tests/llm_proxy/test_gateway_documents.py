"""The pages about the gateway and its tokens agree with the code: states, bounds, and tests that exist."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

from agentlightning.llm_proxy import GatewayLimits
from agentlightning.semconv import CallState

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/deep-dive/gateway.md"


def rows(mark: str) -> list[list[str]]:
    """Return the cells of the table after a mark, without the head."""
    table = PAGE.read_text().partition(f"<!-- {mark} -->")[2].strip().partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_page_has_every_state_of_a_call_and_no_other() -> None:
    states = [row[0].strip("`") for row in rows("states")]
    assert set(states) == set(get_args(CallState))
    assert [row[0] for row in rows("states") if row[2] == "yes"] == ["`ok`"]


def test_the_page_has_every_bound_with_its_default() -> None:
    shown = {row[0].strip("`"): row[1] for row in rows("limits")}
    assert set(shown) == {field.name for field in fields(GatewayLimits)}
    for name, text in shown.items():
        default = getattr(GatewayLimits(), name)
        number = re.match(r"[\d,]+", text)
        scale = 2**20 if "MiB" in text else 1
        value = None if number is None else int(number[0].replace(",", "")) * scale
        assert value == default, name
