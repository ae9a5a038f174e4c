"""What the server is: versions, where the data lie, and the store's own counters. No paths and no secrets."""

from __future__ import annotations

import platform
import time

from agentlightning.dashboard.values import ServerFacts
from agentlightning.store.base import LightningStore
from agentlightning.utils.version import VERSION

_BACKENDS = {"InMemory": "memory", "SQLite": "sqlite", "Postgres": "postgres", "Mongo": "mongo"}


async def facts_of(store: LightningStore, started: float) -> ServerFacts:
    """Return what the server of a store is; `started` is when it was made, seconds since the epoch."""
    statistics = dict(await store.statistics())
    name = str(statistics.get("name") or type(store).__name__)
    backend = next((word for start, word in _BACKENDS.items() if name.startswith(start)), name)
    capabilities = store.capabilities
    return ServerFacts(
        version=VERSION,
        python=platform.python_version(),
        backend=backend,
        persistent=bool(capabilities.get("persistent", capabilities.get("persistence"))),
        started=started,
        now=time.time(),
        statistics=statistics,
    )
