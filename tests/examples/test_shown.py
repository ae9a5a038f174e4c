"""How what an example prints is compared with its README, and what every example has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.shown import EXAMPLES, ROOT, same

FOLDERS = sorted(
    {path.parent for path in EXAMPLES.glob("[!_.]*/*") if path.name != "__pycache__"}  # which outlives a moved example
)


def test_numbers_may_differ_within_the_tolerance_and_nothing_else() -> None:
    assert same("reward 0.51 \n", "reward 0.52", tolerance=0.02)
    assert not same("reward 0.51", "reward 0.55", tolerance=0.02)
    assert not same("step 1", "step 2", tolerance=5.0)
    assert not same("reward 0.51", "reward 0.51 0.52", tolerance=0.02)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_every_example_has_a_readme_a_test_and_a_line_in_the_list(folder: Path) -> None:
    assert (folder / "README.md").is_file()
    assert (ROOT / f"tests/examples/test_{folder.name}.py").is_file()
    assert f"]({folder.name}/README.md)" in (EXAMPLES / "README.md").read_text()


def test_the_list_names_no_example_that_is_not_there() -> None:
    named = re.findall(r"\]\((\w+)/README\.md\)", (EXAMPLES / "README.md").read_text())
    assert sorted(named) == [folder.name for folder in FOLDERS]
