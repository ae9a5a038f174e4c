"""One suite for all stores: every test of this folder runs on each of these."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from agentlightning.store.base import LightningStore
from agentlightning.store.client_server import LightningStoreClient, LightningStoreServer
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.store.sqlite import SQLiteLightningStore
from agentlightning.store.threading import LightningStoreThreaded
from agentlightning.store.wrappers import LightningStoreScoped
from agentlightning.types import Span

KINDS = (
    *("memory", "threaded", "scoped", "sqlite", "mongo", "postgres"),
    *("client over memory", "client over sqlite", "client over postgres"),
)
SETTINGS: dict[str, Any] = {"scan_debounce_seconds": 0.0, "lease_seconds": 0.4}


@dataclass
class Given:
    """A store under test and what made it."""

    store: LightningStore
    engine: LightningStore


@pytest.fixture(params=KINDS)
async def given(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Given]:
    kind: str = request.param
    engine = _engine(kind, request, tmp_path)
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


def _engine(kind: str, request: pytest.FixtureRequest, folder: Path) -> LightningStore:
    """Make the store at the bottom; in a database it has a partition of its own."""
    if "sqlite" in kind:
        return SQLiteLightningStore(folder / "store.db", synchronous="NORMAL", **SETTINGS)
    if "mongo" in kind:
        from agentlightning.store.mongo import MongoLightningStore

        return MongoLightningStore(request.getfixturevalue("mongo_uri"), partition_id=uuid4().hex, **SETTINGS)
    if "postgres" in kind:
        from agentlightning.store.postgres import PostgresLightningStore

        return PostgresLightningStore(request.getfixturevalue("postgres_uri"), partition=uuid4().hex, **SETTINGS)
    return InMemoryLightningStore(**SETTINGS)


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
