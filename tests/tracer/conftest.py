"""A real tracer, and an attempt to trace."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.otel import OtelTracer
from agentlightning.types import AttemptedRollout


@pytest.fixture
def tracer(store: InMemoryLightningStore) -> Iterator[OtelTracer]:
    tracer = OtelTracer()
    with tracer.lifespan(store):
        yield tracer


@pytest.fixture
async def rollout(store: InMemoryLightningStore) -> AttemptedRollout:
    return await store.start_rollout(input="task")
