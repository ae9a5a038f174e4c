"""One way to get a store of a kind, and one to serve it; all of it ends with its test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreThreaded
from agentlightning.store.wrappers import LightningStoreScoped
from tests.chaos.stores import fresh_place
from tests.store.parts import serving

Serve = Callable[..., Awaitable[Any]]
"""Starts a server of a store (one in memory by default) with settings; returns the server and a client."""


@dataclass
class Given:
    """A store under test, and the one of this process that it leads to."""

    store: LightningStore
    engine: LightningStore


async def open_store(
    kind: str, request: pytest.FixtureRequest, folder: Path, stack: AsyncExitStack, settings: dict[str, Any]
) -> Given:
    """Open a store of a kind, for example `sqlite`, `threaded` or `client over postgres`."""
    backend = "memory" if kind in ("threaded", "scoped") else kind.rpartition(" ")[2]
    opened = fresh_place(backend, request, folder).opened(synchronous="NORMAL", **settings)
    store = engine = await stack.enter_async_context(opened)
    if kind == "threaded":
        store = LightningStoreThreaded(engine)
        stack.push_async_callback(store.close)
    elif kind == "scoped":
        store = LightningStoreScoped(engine, None)
    elif kind.startswith("client"):
        _, store = await stack.enter_async_context(serving(engine))
    return Given(store, engine)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def serve(stack: AsyncExitStack) -> Serve:
    return lambda store=None, **settings: stack.enter_async_context(
        serving(store or InMemoryLightningStore(), **settings)
    )


@pytest.fixture(params=["memory", "sqlite"])
async def local(request: pytest.FixtureRequest, tmp_path: Path, stack: AsyncExitStack) -> LightningStore:
    """A store of this process, with the `SETTINGS` of its test's module."""
    return (await open_store(request.param, request, tmp_path, stack, getattr(request.module, "SETTINGS", {}))).store


@pytest.fixture(params=["memory", "sqlite", "client over memory"])
async def given(request: pytest.FixtureRequest, tmp_path: Path, stack: AsyncExitStack) -> Given:
    return await open_store(request.param, request, tmp_path, stack, {})


@pytest.fixture
def store(given: Given) -> LightningStore:
    return given.store
