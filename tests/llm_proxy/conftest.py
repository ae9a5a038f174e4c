"""The default desk, ready to use."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from tests.llm_proxy.desk import Desk


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGL_TOKEN", raising=False)
    monkeypatch.delenv("AGL_INSECURE", raising=False)


@pytest.fixture
async def desk() -> AsyncGenerator[Desk, None]:
    async with Desk() as ready:
        yield ready
