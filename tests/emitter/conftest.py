"""An open trace context that keeps its spans in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from agentlightning.tracer.otel import OtelTracer


@pytest.fixture
async def tracer() -> AsyncIterator[OtelTracer]:
    tracer = OtelTracer()
    with tracer.lifespan():
        async with tracer.trace_context("test"):
            yield tracer
