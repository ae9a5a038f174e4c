"""Every test of this folder runs on every backend that supports it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.stores import SPECS, Place, fresh_place

DURABLE = ("sqlite", "postgres")
"""Those whose kill points are tested."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here takes long: `make test-heavy` runs it."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.heavy)


@pytest.fixture(params=SPECS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A fresh place, of each backend."""
    return fresh_place(request.param, request, tmp_path)


@pytest.fixture(params=DURABLE)
def durable(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A fresh place, of each backend that outlives its process."""
    return fresh_place(request.param, request, tmp_path)
