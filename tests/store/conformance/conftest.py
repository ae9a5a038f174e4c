"""One suite for all stores: every test of this folder runs on each of these."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.store.conftest import Given, open_store

KINDS = (
    *("memory", "threaded", "scoped", "sqlite", "mongo", "postgres"),
    *("client over memory", "client over sqlite", "client over postgres"),
)
SETTINGS: dict[str, Any] = {"scan_debounce_seconds": 0.0, "lease_seconds": 0.4}


@pytest.fixture(params=KINDS)
async def given(request: pytest.FixtureRequest, tmp_path: Path, stack: AsyncExitStack) -> Given:
    return await open_store(request.param, request, tmp_path, stack, SETTINGS)
