"""The heavy tests run in parts, drawn by the commit: each test is in one part, and each part has its commits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.in_turn import part_in_turn, part_of

ROOT = Path(__file__).parents[1]


def test_the_parts_of_all_commits_are_all_tests_each_once(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text("".join(f"def test_{n}():\n    pass\n" for n in range(20)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "IN_TURN": "3"}
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    ran: dict[str, list[str]] = {}
    for number in range(100):
        message = ["commit", "-q", "--allow-empty", "-m", str(number)]
        subprocess.run(["git", *who, *message], cwd=tmp_path, check=True)
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True)
        turn = str(part_in_turn(head.stdout.strip(), 3) + 1)
        if turn in ran:
            continue
        command = [sys.executable, "-m", "pytest", "-p", "tests.in_turn", "-p", "no:cacheprovider", "-v"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
        assert re.findall(r"runs part (\d) of 3", done.stdout) == [turn]
        ran[turn] = re.findall(r"::(test_\d+) PASSED", done.stdout)
        if len(ran) == 3:
            break
    assert sorted(name for names in ran.values() for name in names) == sorted(f"test_{n}" for n in range(20))
    assert min(len(names) for names in ran.values()) > 0


@given(st.text(alphabet="0123456789abcdef", min_size=40, max_size=40), st.text(), st.integers(1, 9))
def test_parameters_of_a_test_stay_together(commit: str, name: str, parts: int) -> None:
    test = f"tests/a.py::test_{name.replace('[', '')}"
    assert part_of(test, parts) == part_of(f"{test}[x-1]", parts) < parts
    assert 0 <= part_in_turn(commit, parts) < parts
