"""Run each failed test once more, alone, at the end of its stage: `python -m pytest -p tests.unsteady ...`.

A test that passes then is unsteady: the stage passes, and the name, the seed and the first traceback are printed and
kept in `build/unsteady.jsonl`. A test that fails again fails the stage, and so do more than `MOST` unsteady tests of
one check, which is all stages with the same `CHECK_ID`. `python -m tests.unsteady` prints what was kept.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MOST = 5
"""Unsteady tests of one check before it fails, and failed tests of one stage before none is run again."""
FILE = Path("build/unsteady.jsonl")
"""A JSON object a line: `check`, `test`, `seed`, `traceback`."""
RERUN_SECONDS = 900


class FailedTestsOnceMore:
    """Collects the failed tests of a session and runs them again when it has ended, each in a process of its own."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._check = os.environ.get("CHECK_ID") or f"process {os.getpid()}"
        self._tracebacks: dict[str, str] = {}
        self._outcome: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._tracebacks.setdefault(report.nodeid, report.longreprtext)

    @pytest.hookimpl(trylast=True)  # the test processes of xdist have ended by then
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus != pytest.ExitCode.TESTS_FAILED or not self._tracebacks:
            return
        if len(self._tracebacks) > MOST:
            self._outcome.append(
                f"{len(self._tracebacks)} tests failed: too many to run each once more (at most {MOST})"
            )
            return
        unsteady = [test for test in self._tracebacks if self._passes_alone(test)]
        self._keep(unsteady)
        of_check = sum(entry["check"] == self._check for entry in read(FILE))
        if of_check > MOST:
            self._outcome.append(f"{of_check} unsteady tests in this check: at most {MOST} are let through")
        elif len(unsteady) == len(self._tracebacks):
            session.exitstatus = pytest.ExitCode.OK

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._outcome:
            terminalreporter.section("unsteady")
            for line in self._outcome:
                terminalreporter.line(line)

    def _passes_alone(self, test: str) -> bool:
        command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-q", test]
        try:
            done = subprocess.run(
                command, cwd=self._config.rootpath, timeout=RERUN_SECONDS, capture_output=True, text=True
            )
            passed, printed = done.returncode == 0, done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            passed, printed = False, f"it did not end within {RERUN_SECONDS} s"
        if not passed:
            self._outcome += [f"FAILED AGAIN, alone: {test}", printed]
        return passed

    def _keep(self, unsteady: list[str]) -> None:
        FILE.parent.mkdir(exist_ok=True)
        with FILE.open("a", encoding="utf-8") as file:
            for test in unsteady:
                traceback = self._tracebacks[test]
                entry = {"check": self._check, "test": test, "seed": self._seed(), "traceback": traceback}
                file.write(json.dumps(entry) + "\n")
                self._outcome += [f"unsteady, passed alone: {test} (Hypothesis seed: {self._seed()})", traceback]

    def _seed(self) -> str:
        seed = self._config.getoption("--hypothesis-seed", default=None)
        return str(seed) if seed is not None else "fixed, by CI" if os.environ.get("CI") else "drawn anew"


def pytest_configure(config: pytest.Config) -> None:
    """Take part, but not in the test processes of xdist."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailedTestsOnceMore(config))


def read(file: Path) -> list[dict[str, str]]:
    """Return the unsteady tests that were kept, the oldest first."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    for each in read(FILE):
        last = each["traceback"].strip().splitlines()[-1:] or ["no traceback"]
        print(f"- {each['test']} (check {each['check']}, seed {each['seed']}): {last[0]}")
