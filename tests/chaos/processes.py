"""Processes that start in milliseconds, forked from one that has imported everything already; a store server as one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from agentlightning.store import LightningStore, LightningStoreServer
from tests.chaos.stores import open_store
from tests.stubs.ports import free_port

CONTEXT = multiprocessing.get_context("forkserver")
"""Makes the processes of this folder; their target must live at module level."""

CONTEXT.set_forkserver_preload(["agentlightning", "tests.chaos.stores"])
LIMIT_SECONDS = 60.0
"""Seconds after which a server that has not started ends the run."""
Prepare = Callable[[LightningStore], object]
"""A function that prepares a store before it is served; it must be picklable."""


class StoreProcess:
    """A store server on one port and one place, in a process of its own, started and killed as often as one likes."""

    def __init__(self, spec: str, **settings: Any) -> None:
        self.spec, self.settings, self.port = spec, settings, free_port()
        self._process: Any = None

    @property
    def endpoint(self) -> str:
        """URL for the clients."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, prepare: Prepare | None = None) -> None:
        """Return when requests are answered."""
        ours, theirs = CONTEXT.Pipe()
        arguments = (self.spec, self.settings, self.port, prepare, theirs)
        self._process = CONTEXT.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        with ours:
            if not ours.poll(LIMIT_SECONDS):
                raise RuntimeError(f"the store server on {self.spec} did not start")
            with contextlib.suppress(EOFError):  # it is dead already, by what was prepared
                ours.recv()

    def is_alive(self) -> bool:
        """True while it runs."""
        return self._process is not None and self._process.is_alive()

    def joined(self) -> int | None:
        """Wait for its end and return its exit code."""
        self._process.join(LIMIT_SECONDS)
        return self._process.exitcode

    def kill(self) -> None:
        """Kill it, and return when it is dead."""
        if self._process is not None:
            self._process.kill()
            self._process.join()


def _serve(spec: str, settings: dict[str, Any], port: int, prepare: Prepare | None, pipe: Connection) -> None:
    """Serve the store until killed."""
    logging.disable()

    async def run() -> None:
        store = open_store(spec, **settings)
        if prepare is not None:
            prepare(store)
        server = LightningStoreServer(store, port=port)
        await server.start()
        pipe.send("ready")
        await asyncio.Event().wait()

    asyncio.run(run())
