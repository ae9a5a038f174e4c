"""The address of a store's data, as one string that any process can open, for the tests of this folder.

A new backend joins by one line in `SPECS`, and one in `conftest.py` if it outlives its process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from agentlightning.store import LightningStore, LightningStoreClient, LightningStoreServer
from agentlightning.store.spec import store_from_spec


@dataclass(frozen=True)
class Place:
    """One backend and where its data lies."""

    name: str
    spec: str

    def open(self, **settings: Any) -> LightningStore:
        """Open the store here."""
        return open_store(self.spec, **settings)

    @contextlib.asynccontextmanager
    async def opened(self, **settings: Any) -> AsyncIterator[LightningStore]:
        """The store here, closed at the end."""
        store = self.open(**settings)
        try:
            yield store
        finally:
            await store.close()

    @contextlib.asynccontextmanager
    async def everywhere(self, store: LightningStore) -> AsyncIterator[str]:
        """Give the string under which another process opens the same data: this one, or a server over `store`."""
        if self.spec != "memory":
            yield self.spec
        else:
            async with served(store) as endpoint:
                yield endpoint

    def copied(self, folder: Path) -> Place:
        """Return a copy of the data as they lie there, so that a look at them recovers nothing; a database that runs
        by itself is its own copy. Nobody may be writing."""
        if not self.spec.startswith("sqlite:///"):
            return self
        path = self.spec.removeprefix("sqlite:///")
        for suffix in ("", "-wal"):
            (folder / f"copy.db{suffix}").unlink(missing_ok=True)
            if os.path.exists(path + suffix):
                shutil.copyfile(path + suffix, folder / f"copy.db{suffix}")
        (folder / "copy.db-shm").unlink(missing_ok=True)
        return Place(self.name, f"sqlite:///{folder}/copy.db")

    def integrity(self) -> str:
        """Return `ok`, or what the backend's own check finds wrong. Nobody may be writing."""
        if not self.spec.startswith("sqlite:///"):
            return "ok"
        with contextlib.closing(sqlite3.connect(self.spec.removeprefix("sqlite:///"))) as db:
            return "; ".join(row[0] for row in db.execute("PRAGMA integrity_check"))


@contextlib.asynccontextmanager
async def served(store: LightningStore) -> AsyncIterator[str]:
    """Give the address of a server over a store, in this process."""
    server = LightningStoreServer(store, port=0)
    await server.start()
    try:
        yield server.endpoint
    finally:
        await server.stop()


def open_store(spec: str, **settings: Any) -> LightningStore:
    """Open a store by its string; `settings` are those of its class (a client has none of them)."""
    if spec.startswith("http"):
        return LightningStoreClient(spec, deadline=60.0)
    if not spec.startswith("sqlite:"):
        settings.pop("synchronous", None)
    return store_from_spec(spec, **settings)


SPECS: dict[str, Callable[[pytest.FixtureRequest, Path], str]] = {
    "memory": lambda request, folder: "memory",
    "sqlite": lambda request, folder: f"sqlite:///{folder}/store.db",
    "postgres": lambda request, folder: _partition_of(request.getfixturevalue("postgres_uri")),
    "mongo": lambda request, folder: _partition_of(request.getfixturevalue("mongo_uri") + "/agl_test"),
}
"""Fresh data of each backend."""


def fresh_place(name: str, request: pytest.FixtureRequest, folder: Path) -> Place:
    """Return an empty place; `folder` is the test's own."""
    return Place(name, SPECS[name](request, folder))


def _partition_of(uri: str) -> str:
    return f"{uri}{'&' if '?' in uri else '?'}partition={uuid4().hex}"
