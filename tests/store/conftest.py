"""A store of each kind that users meet: in memory, in a file, behind a server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentlightning.store import (
    InMemoryLightningStore,
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
    SQLiteLightningStore,
)


@pytest.fixture(params=["memory", "sqlite", "client"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LightningStore]:
    if request.param == "sqlite":
        file = SQLiteLightningStore(tmp_path / "store.db", synchronous="NORMAL")
        yield file
        await file.close()
    elif request.param == "memory":
        yield InMemoryLightningStore()
    else:
        served = LightningStoreServer(InMemoryLightningStore(), port=0)
        await served.start()
        client = LightningStoreClient(served.endpoint, deadline=5.0)
        yield client
        await client.close()
        await served.stop()
