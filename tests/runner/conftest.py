"""A way to run tasks through a real runner."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from agentlightning.store.memory import InMemoryLightningStore
from tests.stubs.running import run_tasks


@pytest.fixture
def serve(store: InMemoryLightningStore) -> Callable[..., Any]:
    return partial(run_tasks, store)
