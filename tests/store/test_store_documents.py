"""The documents about the store agree with its code: tables of statuses, settings of specs, programs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import ConflictError
from agentlightning.store import spec
from agentlightning.store.rules.lifecycle import (
    ATTEMPT_STATUSES,
    LEASE_EXPIRED,
    ROLLOUT_STATUSES,
    check_attempt_change,
    check_rollout_change,
    rollout_after,
)
from agentlightning.types import Attempt, RolloutConfig

DOCS = Path(__file__).parents[2] / "docs"
STORE = DOCS / "deep-dive/store.md"
HOW_TO = sorted((DOCS / "how-to").glob("*store.md"))


def table(text: str, mark: str) -> tuple[list[str], dict[str, list[str]]]:
    """Return the head and the rows of the table behind a mark in a document."""
    lines = text.partition(f"<!-- {mark} -->")[2].strip().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[: lines.index("")]]
    return cells[0][1:], {row[0]: row[1:] for row in cells[2:]}


def attempt(status: str, number: int = 1, **fields: object) -> Attempt:
    values = {"rollout_id": "ro-1", "attempt_id": "at-1", "sequence_id": number, "start_time": 0.0, "status": status}
    return Attempt.model_validate({**values, **fields})


def change(kind: str, status: Any, to: Any) -> str:
    """Return the sign of a change in the tables of the documents."""
    try:
        changes = (
            check_rollout_change("ro-1", status, to) if kind == "rollout" else check_attempt_change(attempt(status), to)
        )
    except ConflictError:
        return "x"
    return "." if changes else "="


@pytest.mark.parametrize(("kind", "statuses"), [("rollout", ROLLOUT_STATUSES), ("attempt", ATTEMPT_STATUSES)])
def test_the_table_of_changes_is_the_one_in_the_code(kind: str, statuses: tuple[str, ...]) -> None:
    head, rows = table(STORE.read_text(), f"{kind} transitions")
    assert tuple(head) == tuple(rows) == statuses
    assert rows == {status: [change(kind, status, to) for to in head] for status in statuses}


@pytest.mark.parametrize("status", ATTEMPT_STATUSES)
def test_what_a_rollout_becomes_after_its_attempt_is_what_the_table_says(status: str) -> None:
    _, rows = table(STORE.read_text(), "rollout after attempt")
    assert tuple(rows) == ATTEMPT_STATUSES
    with_retry, without = rows[status]
    config = RolloutConfig(max_attempts=2, retry_condition=["failed", "unresponsive", "timeout"])
    assert rollout_after(attempt(status, 1), config, 0) == with_retry
    assert rollout_after(attempt(status, 2), config, 0) == without
    assert rollout_after(attempt(status, 1), RolloutConfig(max_attempts=2), 0) == without
    if status == "unresponsive":
        lost = attempt(status, 3, outcome_reason=LEASE_EXPIRED)
        assert rollout_after(lost, RolloutConfig(infrastructure_retries=3), 2) == with_retry
        assert rollout_after(lost, RolloutConfig(infrastructure_retries=3), 3) == without


def test_every_arrow_of_the_picture_is_a_change_that_the_code_allows() -> None:
    [picture] = re.findall(r"^```mermaid\n(.*?)^```", STORE.read_text(), re.DOTALL | re.MULTILINE)
    arrows = re.findall(r"^ +(\S+) --> (\w+): (.+)$", picture, re.MULTILINE)
    assert len(arrows) == len(picture.splitlines()) - 1
    assert {to for _, to, _ in arrows} == set(ROLLOUT_STATUSES)
    for status, to, cause in arrows:
        if status != "[*]" and cause != "start_attempt":
            assert change("rollout", status, to) == ".", f"{status} --> {to}"


def test_the_retry_defaults_that_are_named_are_those_of_the_code() -> None:
    assert f"`infrastructure_retries` ({RolloutConfig().infrastructure_retries})" in STORE.read_text()


def test_the_settings_of_every_form_are_listed() -> None:
    text = (DOCS / "how-to/choose-a-store.md").read_text()
    _, rows = table(text, "settings of specs")
    listed = {form.strip("`"): set(re.findall(r"`(\w+)`", settings)) for form, [settings, *_] in rows.items()}
    assert listed == {kind.example: set(kind.settings) for kind in spec._KINDS.values()}
    assert set(listed) == set(spec.FORMS)


def programs() -> list[Any]:
    blocks = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [
        pytest.param(program, id=f"{document.stem} {number}")
        for document in (STORE, *HOW_TO)
        for number, program in enumerate(blocks.findall(document.read_text()))
    ]


@pytest.mark.parametrize("program", programs())
def test_the_programs_run_as_printed(program: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-W", "error", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
