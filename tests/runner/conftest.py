"""A real store, and a way to run tasks through a real runner."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest

from agentlightning.store.memory import InMemoryLightningStore
from tests.runner.serving import run_tasks


@pytest.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    store = InMemoryLightningStore()
    yield store
    await store.close()


@pytest.fixture
def serve(store: InMemoryLightningStore) -> Callable[..., Any]:
    """`run_tasks` on the store."""
    return partial(run_tasks, store)
