"""The page on alarms names each rule with its thresholds and defaults, and its program runs."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from agentlightning.training.alarms.alarms import RULES
from agentlightning.training.alarms.rule import Rule

PAGE = (Path(__file__).parents[3] / "docs/how-to/watch-a-run.md").read_text()


def test_the_table_has_every_rule_with_its_own_thresholds() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|[^|]+\| ([^|]*) ?\|$", PAGE, re.MULTILINE))
    usual = {field.name: field.default for field in dataclasses.fields(Rule)} | {"margin": 0.0}
    expected = {
        name: ", ".join(
            f"`{field.name}` {field.default}"
            for field in dataclasses.fields(rule)
            if usual.get(field.name) != field.default and not (field.name == "margin" and field.default == 0.1)
        )
        for name, rule in RULES.items()
    }
    found = {name: ", ".join(sorted(cell.strip().split(", "))) for name, cell in rows.items()}
    assert found == {name: ", ".join(sorted(cell.split(", "))) for name, cell in expected.items()}


def test_the_program_of_the_page_runs() -> None:
    [program] = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    exec(program, names)
    assert names["algorithm"].settings.alarms["cut_off"] is None  # type: ignore[attr-defined]
