"""A gateway that demands keys, and nothing that reaches beyond this machine."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

NOT_OURS = (
    "ignore:unclosed:ResourceWarning",  # programs leave their clients open, as most programs do
    "ignore:Pydantic serializer warnings",  # some packages dump parsed answers by the type of unparsed ones
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let pass what the packages warn of in themselves."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for warning in NOT_OURS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True, scope="module")
def _left_open() -> Iterator[None]:
    yield
    gc.collect()  # within this folder, so that no other test meets what was left open


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_TOKEN", "the-secret-of-the-server")
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")  # that library sends traces to its vendor
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", "LANGSMITH_TRACING"):
        monkeypatch.delenv(name, raising=False)
