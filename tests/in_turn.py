"""Run one part of the chosen tests, which is drawn by the hash of the commit: `python -m pytest -p tests.in_turn ...`.

For stages that are slow and stable. `IN_TURN=3` makes three parts (2 by default). A test belongs to a part by its name,
whatever its parameters, and keeps it.
"""

from __future__ import annotations

import os
import subprocess
import zlib

import pytest


def part_of(test: str, parts: int) -> int:
    """Return the part, from 0, to which a test belongs: `tests/a.py::test_b[x]` and `[y]` to the same."""
    return zlib.crc32(test.partition("[")[0].encode()) % parts


def part_in_turn(commit: str, parts: int) -> int:
    """Return the part whose turn it is at a commit (hexadecimal)."""
    return int(commit[:12] or "0", 16) % parts


class PartInTurn:
    """Deselects the tests of the other parts; the same in every test process."""

    def __init__(self, commit: str, parts: int) -> None:
        self._commit, self._parts, self._turn = commit, parts, part_in_turn(commit, parts)

    def pytest_report_header(self) -> str:
        return f"commit {self._commit[:12]} runs part {self._turn + 1} of {self._parts} (tests/in_turn.py)"

    @pytest.hookimpl(trylast=True)  # after the markers have been chosen
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if part_of(item.nodeid, self._parts) == self._turn]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen


def pytest_configure(config: pytest.Config) -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=config.rootpath, capture_output=True, text=True)
    config.pluginmanager.register(PartInTurn(commit.stdout.strip(), int(os.environ.get("IN_TURN", "2"))))
