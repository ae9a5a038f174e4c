"""The budget of lines holds: within it, above it, and an entry that is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.packaging import shape


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "package" / "inner").mkdir(parents=True)
    (tmp_path / "package" / "one.py").write_text("a = 1\nb = 2\n")
    (tmp_path / "package" / "inner" / "two.py").write_text("c = 3\n")
    (tmp_path / "package" / "page.md").write_text("not counted\n")
    return tmp_path


@pytest.mark.parametrize(("lines", "files", "code"), [(3, 2, 0), (2, 2, 1), (3, 1, 1)])
def test_a_folder_above_its_budget_fails(
    tree: Path, lines: int, files: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "shape.toml").write_text(f"package = {{ lines = {lines}, files = {files} }}\n")
    assert shape.main(tree) == code
    assert ("above its budget" in capsys.readouterr().out) == bool(code)


def test_an_entry_that_is_no_budget_is_refused_with_its_name(tree: Path) -> None:
    (tree / "shape.toml").write_text("package = 3\n")
    with pytest.raises(ValueError, match=r"shape.toml: 'package' must be \{ lines = 100, files = 10 \}; got 3"):
        shape.main(tree)


def test_every_folder_of_the_budget_is_there() -> None:
    assert all(size.files for size in shape.sizes(list(shape.budgets())).values())
