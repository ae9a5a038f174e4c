"""A store of each kind that users meet: in memory, in a file, behind a server; and servers that end with their test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest

from agentlightning.store import (
    InMemoryLightningStore,
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
    SQLiteLightningStore,
)


class Serve(Protocol):
    """Starts a server of a store, one in memory by default; it ends with the test, and so does its client."""

    async def __call__(
        self, store: LightningStore | None = None, **settings: Any
    ) -> tuple[LightningStoreServer, LightningStoreClient]: ...


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def start(
            store: LightningStore | None = None, **settings: Any
        ) -> tuple[LightningStoreServer, LightningStoreClient]:
            server = LightningStoreServer(store or InMemoryLightningStore(), port=0, **settings)
            await server.start()
            stack.push_async_callback(server.stop)
            client = LightningStoreClient(server.endpoint, deadline=5.0)
            stack.push_async_callback(client.close)
            return server, client

        yield start


@pytest.fixture(params=["memory", "sqlite", "client"])
async def store(request: pytest.FixtureRequest, tmp_path: Path, serve: Serve) -> AsyncIterator[LightningStore]:
    if request.param == "sqlite":
        file = SQLiteLightningStore(tmp_path / "store.db", synchronous="NORMAL")
        yield file
        await file.close()
    elif request.param == "memory":
        yield InMemoryLightningStore()
    else:
        yield (await serve())[1]
