"""One suite for all stores: every test of this folder runs on each of these."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentlightning.store.base import LightningStore
from agentlightning.store.client_server import LightningStoreClient, LightningStoreServer
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.store.scoped import LightningStoreScoped
from agentlightning.store.sqlite import SQLiteLightningStore
from agentlightning.store.threading import LightningStoreThreaded
from agentlightning.types import Span

KINDS = ("memory", "threaded", "scoped", "sqlite", "client over memory", "client over sqlite")
SETTINGS: dict[str, Any] = {"scan_debounce_seconds": 0.0, "lease_seconds": 0.4}


@dataclass
class Given:
    """A store under test and what made it."""

    store: LightningStore
    engine: LightningStore


@pytest.fixture(params=KINDS)
async def given(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Given]:
    kind: str = request.param
    if "sqlite" in kind:
        engine: LightningStore = SQLiteLightningStore(tmp_path / "store.db", synchronous="NORMAL", **SETTINGS)
    else:
        engine = InMemoryLightningStore(**SETTINGS)
    server = client = None
    store = engine
    if kind == "threaded":
        store = LightningStoreThreaded(engine)
    elif kind == "scoped":
        store = LightningStoreScoped(engine, None)
    elif kind.startswith("client"):
        server = LightningStoreServer(engine, port=0)
        await server.start()
        store = client = LightningStoreClient(server.endpoint, deadline=5.0)
    yield Given(store, engine)
    if client is not None and server is not None:
        await client.close()
        await server.stop()
    await store.close()
    await engine.close()


@pytest.fixture
def store(given: Given) -> LightningStore:
    return given.store


@pytest.fixture
def span() -> Callable[..., Span]:
    """Makes spans of an attempted rollout; numbered by the store unless a number is given."""

    def make(attempted: Any, name: str = "step", sequence_id: int = -1, **fields: Any) -> Span:
        return Span.from_attributes(
            attributes=fields.pop("attributes", {"k": "v"}),
            rollout_id=attempted.rollout_id,
            attempt_id=attempted.attempt.attempt_id,
            sequence_id=sequence_id,
            name=name,
            **fields,
        )

    return make
