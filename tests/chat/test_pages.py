"""The page on judges: its blocks run, with a judge on a socket."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chat.test_judge import between, said
from tests.chat.test_ranking import by_length
from tests.pages import run_page
from tests.stubs.model_server import ModelServer


def judges(request: dict[str, Any]) -> str:
    if not between("reference", said(request)):
        return by_length(request)
    right = between("answer", said(request)) == between("reference", said(request))
    return f'{{"score": {10 if right else 0}}}'


@pytest.mark.heavy
def test_the_blocks_of_the_page_do_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    with ModelServer(judges) as server:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-none")
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        _, printed = run_page("how-to/judge.md", monkeypatch)
    assert printed.splitlines()[-2:] == [
        "[1.0, 0.0]",
        "(0.5, 0.0, 1.0) 0 0% of the pairs depend on the order",
    ]
