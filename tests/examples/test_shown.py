"""The comparison of an example's output with its README, and the files that every example has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.shown import EXAMPLES, RECIPES, ROOT, same

LISTS = {EXAMPLES / "README.md": EXAMPLES, RECIPES.parent / "README.md": RECIPES}
FOLDERS = {
    path: page
    for page, folder in LISTS.items()
    for path in sorted(folder.glob("[!_.]*"))
    if any(each.name != "__pycache__" for each in path.glob("*"))  # which outlives an example that was moved
}
"""Each example and recipe, and the page with its line."""


def test_numbers_may_differ_within_the_tolerance_and_nothing_else() -> None:
    assert same("reward 0.51 \n", "reward 0.52", tolerance=0.02)
    assert not same("reward 0.51", "reward 0.55", tolerance=0.02)
    assert not same("step 1", "step 2", tolerance=5.0)
    assert not same("reward 0.51", "reward 0.51 0.52", tolerance=0.02)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_every_example_has_a_readme_a_test_and_a_line_in_the_list(folder: Path) -> None:
    assert (folder / "README.md").is_file()
    assert (ROOT / f"tests/examples/test_{folder.name}.py").is_file()
    page = FOLDERS[folder]
    assert f"]({folder.relative_to(page.parent)}/README.md)" in page.read_text()


@pytest.mark.parametrize("page", LISTS, ids=lambda path: path.parent.name)
def test_a_list_names_no_example_that_is_not_there(page: Path) -> None:
    prefix = LISTS[page].relative_to(page.parent).as_posix().replace(".", "")
    named = re.findall(rf"^\| \[\w+\]\(({prefix}/?\w+)/README\.md\)", page.read_text(), re.MULTILINE)
    assert sorted(named) == [str(path.relative_to(page.parent)) for path, listed in FOLDERS.items() if listed == page]
