"""The pages on training and agents: each of their programs runs, top to bottom, and prints what stands beside it."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stubs.model_server import ModelServer

pytest.importorskip("openai", reason="openai is not installed (the extra demo has it)")

DOCS = Path(__file__).parents[2] / "docs"
HOW_TO = ("write-an-agent", "write-an-algorithm", "emit-rewards", "promote")
PAGES = ["quickstart.md", *(f"how-to/{name}.md" for name in HOW_TO)]
ENGINE = "http://127.0.0.1:8000"
"""Address of the model on the pages; a stub listens there."""


@pytest.fixture
def engine() -> Iterator[str]:
    with ModelServer(answer=lambda request: "It is 42") as model:
        yield model.base_url.removesuffix("/v1")


@pytest.mark.parametrize("page", PAGES)
def test_the_programs_of_a_page_print_what_the_page_says(
    page: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    comments, shown = list[str](), io.StringIO()
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.S | re.M)):
        code = compile(block.replace(ENGINE, engine), f"{page}, program {number}", "exec")
        with contextlib.redirect_stdout(shown):
            exec(code, module.__dict__)
        comments += re.findall(r"^print\(.*\)  # (.+)$", block, re.M)
    assert comments
    lines = iter(shown.getvalue().splitlines())
    for expected in comments:
        pattern = re.escape(expected).replace(re.escape("..."), ".*")
        assert any(re.fullmatch(pattern, line.rstrip()) for line in lines), f"{expected!r} in {shown.getvalue()}"
