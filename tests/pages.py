"""The programs of a page of the documents, and how a test runs them."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
OF_THE_DOCUMENTS = "# from the v0.3 documentation\n"
"""First line of a program that ends with the error that stands below it."""


def blocks(page: str | Path, language: str = "python") -> list[str]:
    """Return what stands between the fences of one language on a page, a path in `docs/`, in order."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run_page(
    page: str | Path, patch: pytest.MonkeyPatch, replaced: Mapping[str, str] | None = None
) -> tuple[types.ModuleType, str]:
    """Run the Python of a page from top to bottom in one module; return the module and what was printed.

    A program that begins with the name of a file is written to it; one that is shown with its error must end with it.
    `replaced` are words of the page and what stands for them.
    """
    module, printed, errors = types.ModuleType("page"), io.StringIO(), iter(blocks(page, "text"))
    patch.setitem(sys.modules, "page", module)
    for number, block in enumerate(blocks(page)):
        for word, other in (replaced or {}).items():
            block = block.replace(word, other)
        if file := re.match(r"# (\S+\.py)\n", block):
            Path(file[1]).parent.mkdir(parents=True, exist_ok=True)
            Path(file[1]).write_text(block, encoding="utf-8")
            continue
        code = compile(block, f"{page}, program {number}", "exec")
        with contextlib.redirect_stdout(printed):
            if not block.startswith(OF_THE_DOCUMENTS):
                exec(code, vars(module))
                continue
            with pytest.raises(Exception) as caught:  # noqa: PT011 -- the page says which
                exec(code, vars(module))
            assert f"{caught.type.__name__}: {caught.value}" == next(errors).strip()
    return module, printed.getvalue()


def notes(page: str | Path) -> Iterator[str]:
    """Yield what stands beside each `print` of a page: its output, `...` for any words."""
    for block in blocks(page):
        yield from re.findall(r"^ *print\(.*\)  # (.+)$", block, re.MULTILINE)


def assert_prints_its_notes(page: str | Path, printed: str) -> None:
    """Check that the page has notes, and that they are among the printed lines, in their order."""
    lines, expected = iter(printed.splitlines()), list(notes(page))
    assert expected
    for note in expected:
        pattern = re.escape(note).replace(re.escape("..."), ".*")
        assert any(re.fullmatch(pattern, line.rstrip()) for line in lines), f"{note!r} in {printed}"
