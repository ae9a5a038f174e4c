"""`agl store`: serve a store."""

from __future__ import annotations

import asyncio
from enum import Enum
from pathlib import Path

import typer


class Backend(str, Enum):
    """Where the data lies."""

    SQLITE = "sqlite"
    MEMORY = "memory"


def store(
    host: str = typer.Option("127.0.0.1", help="Address to listen on; beyond loopback AGL_TOKEN is needed."),
    port: int = typer.Option(4747, help="Port; 0 takes a free one."),
    backend: Backend = typer.Option(Backend.SQLITE, help="sqlite is durable, memory is gone with the process."),
    db: Path = typer.Option(Path("agl.db"), help="File of the sqlite backend; made if it is not there."),
    cors_origin: list[str] = typer.Option([], help="Origin whose pages may call the store; may be repeated."),
    log_level: str = typer.Option("INFO", help="DEBUG, INFO, WARNING or ERROR."),
) -> int:
    """Serve a store for algorithm and runners. Ctrl+C ends it.

    Example: agl store --port 4747 --db run.db
    """
    from agentlightning.logging import setup

    setup(log_level)
    try:
        asyncio.run(_serve(host, port, backend, db, cors_origin))
    except KeyboardInterrupt:
        print("store closed")
    return 0


async def _serve(host: str, port: int, backend: Backend, db: Path, cors_origin: list[str]) -> None:
    from agentlightning.store.client_server import LightningStoreServer
    from agentlightning.store.memory import InMemoryLightningStore
    from agentlightning.store.sqlite import SQLiteLightningStore
    from agentlightning.utils.auth import check_bind, server_token

    check_bind(host, server_token())
    inner = InMemoryLightningStore() if backend is Backend.MEMORY else SQLiteLightningStore(db)
    try:
        server = LightningStoreServer(inner, host=host, port=port, cors_allow_origins=cors_origin)
        server.bind()
        where = "memory" if backend is Backend.MEMORY else str(db)
        print(f"store in {where} listens on {server.endpoint}", flush=True)
        await server.run_forever()
    finally:
        await inner.close()
