"""The pages on training and agents: each of their programs runs, top to bottom, and prints what stands beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pages import assert_prints_its_notes, run_page
from tests.stubs.model_server import ModelServer

pytest.importorskip("openai", reason="openai is not installed (the extra demo has it)")

PAGES = [
    "quickstart.md",
    *(f"how-to/{name}.md" for name in ("write-an-agent", "write-an-algorithm", "emit-rewards", "promote")),
    *(f"how-to/{name}.md" for name in ("write-an-adapter", "write-a-tracer", "use-a-coding-agent")),
    *(f"tutorials/{name}.md" for name in ("1-first-agent", "2-tune-a-prompt", "4-scale-out", "5-debug-a-run")),
    pytest.param("tutorials/3-train-weights.md", marks=pytest.mark.heavy),
]
ENGINE = "http://127.0.0.1:8000"
"""Address of the model on the pages; a stub listens there."""


def answer(request: dict[str, Any]) -> str:
    """Answer with a number, or with code where the question has code: at first with wrong code."""
    messages = request["messages"]
    if "def add" not in str(messages[0]):
        return "It is 42"
    return f"def add(a, b):\n    return a {'*' if len(messages) == 1 else '+'} b\n"


@pytest.mark.parametrize("page", PAGES)
def test_the_programs_of_a_page_print_what_the_page_says(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGL_TOKEN", raising=False)
    with ModelServer(answer=answer) as model:
        _, printed = run_page(page, monkeypatch, {ENGINE: model.base_url.removesuffix("/v1")})
    assert_prints_its_notes(page, printed)
