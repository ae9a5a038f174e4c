"""The fixture of tests that run a snippet; the outcome of such a test is compared with the page, or written to it."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

from tests.seeds import table
from tests.seeds.shown import Shown, snippets


@pytest.fixture
def shown(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Shown:
    """The snippet that the test's mark `snippet` names."""
    mark = request.node.get_closest_marker("snippet")
    assert mark is not None, "mark the test with @pytest.mark.snippet('<document>/<name>')"
    return Shown(snippets()[mark.args[0]], monkeypatch, **mark.kwargs)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    yield
    shown = getattr(item, "funcargs", {}).get("shown")
    if shown is None:
        return
    assert shown.used, f"the test of {shown.snippet.id} never ran it"
    assert bool(shown.instead) <= bool(shown.said), f"{shown.snippet.id} ran: take its instead= away"
    if os.environ.get(table.WRITES):
        table.write(shown.snippet, shown.outcome)
    else:
        now, written = table.cell(shown.outcome), table.outcomes().get(shown.snippet.id)
        assert now == written, f"{table.PAGE.name} is out of date; `make documents` writes it again"
