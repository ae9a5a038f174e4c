"""A failed test runs once more, alone: what passes then is reported, what fails again fails the stage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.stubs.processes import run_program

ROOT = Path(__file__).parents[1]
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""The plugins of this repository's own tests are slow to load, and not what is tested."""
FAILS_ONCE = """
import pathlib, pytest
@pytest.mark.parametrize("number", range({count}))
def test_fails_once(number):
    mark = pathlib.Path(__file__).with_name(f"ran-{{number}}")
    ran, _ = mark.exists(), mark.touch()
    assert ran, f"first run of {{number}}"
"""
FAILS_ALWAYS = "def test_fails_always():\n    assert False, 'each time'\n"
PASSES = "def test_passes():\n    pass\n"


def stage(folder: Path, *arguments: str, check: str = "one") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "tests.unsteady", "-p", "no:cacheprovider", *arguments]
    own = {"PYTHONPATH": str(ROOT), "CHECK_ID": check, "CI": "true", **ALONE}
    return run_program(*command, folder=folder, code=None, **own)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_steady.py").write_text(PASSES)
    return tmp_path


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "2")])
def test_a_test_that_passes_alone_is_reported_and_lets_the_stage_pass(folder: Path, workers: tuple[str, ...]) -> None:
    (folder / "test_it.py").write_text(FAILS_ONCE.format(count=2))
    done = stage(folder, *workers)
    assert done.returncode == 0, done.stdout
    for number in (0, 1):
        assert (
            f"unsteady, passed alone: test_it.py::test_fails_once[{number}] (Hypothesis seed: fixed, by CI)"
            in done.stdout
        )
        assert done.stdout.count(f"AssertionError: first run of {number}") >= 2  # where it failed, and under unsteady
    process = run_program("python", "-m", "tests.unsteady", folder=folder, PYTHONPATH=str(ROOT))
    assert "- test_it.py::test_fails_once[0] (check one" in process.stdout


def test_a_test_that_fails_again_fails_the_stage(folder: Path) -> None:
    (folder / "test_it.py").write_text(FAILS_ALWAYS + FAILS_ONCE.format(count=1))
    done = stage(folder)
    assert done.returncode == 1
    assert "FAILED AGAIN, alone: test_it.py::test_fails_always" in done.stdout
    assert "unsteady, passed alone: test_it.py::test_fails_once[0]" in done.stdout


def test_many_failed_tests_are_no_chance_and_not_run_again(folder: Path) -> None:
    (folder / "test_it.py").write_text(FAILS_ONCE.format(count=6))
    done = stage(folder)
    assert done.returncode == 1
    assert "6 tests failed: too many to run each once more (at most 5)" in done.stdout


def test_more_than_five_unsteady_tests_of_all_stages_fail_the_check(folder: Path) -> None:
    for name in ("a", "b", "c"):
        (folder / name).mkdir()
        (folder / name / "test_it.py").write_text(FAILS_ONCE.format(count=3))
    assert stage(folder, "a").returncode == 0
    done = stage(folder, "b")
    assert done.returncode == 1
    assert "6 unsteady tests in this check: at most 5 are let through" in done.stdout
    assert stage(folder, "c", check="another").returncode == 0


def test_errors_of_collection_and_of_fixtures_are_failures_too(folder: Path) -> None:
    (folder / "test_it.py").write_text("import nothing_of_this_name\n")
    assert stage(folder).returncode == 2
    broken = "import pytest\n@pytest.fixture\ndef broken():\n    raise OSError('no')\ndef test_it(broken):\n    pass\n"
    (folder / "test_it.py").write_text(broken)
    done = stage(folder)
    assert done.returncode == 1
    assert "FAILED AGAIN, alone: test_it.py::test_it" in done.stdout


def test_a_stage_that_passes_says_nothing(folder: Path) -> None:
    done = stage(folder)
    assert done.returncode == 0
    assert "unsteady" not in done.stdout
