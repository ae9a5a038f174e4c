"""Where the store server of a run listens, and how its runners reach it."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agentlightning.store.base import LightningStore

if TYPE_CHECKING:
    from agentlightning.store.client_server import LightningStoreServer

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 4747
PAUSE_CEILING_SECONDS = 0.2
_LOCAL = {"0.0.0.0": LOOPBACK, "localhost": LOOPBACK, "::": "::1"}
"""Where a process of this machine connects when a server binds the key."""


@dataclass(frozen=True)
class Address:
    """Host and port to bind, and the host to connect to."""

    host: str
    port: int
    may_move: bool = False
    """Leave the port for a free one if it is in use: nobody asked for it."""
    connect_host: str | None = None
    """None is `host`, or the loopback address where that is none to connect to."""

    @property
    def target(self) -> str:
        """The host to connect to."""
        return self.connect_host or _LOCAL.get(self.host, self.host)

    @property
    def url(self) -> str:
        """The URL that runners connect to."""
        return f"http://[{self.target}]:{self.port}" if ":" in self.target else f"http://{self.target}:{self.port}"

    def at(self, port: int) -> Address:
        """Return the same address with another port, which is to be kept."""
        return replace(self, port=port, may_move=False)

    def bound_server(self, store: LightningStore) -> LightningStoreServer:
        """Return a store server whose port is taken and which does not serve yet.

        Raises:
            RuntimeError: the port is in use, or `host` is beyond loopback and there is no token; says what to do.
            ValueError: the store may not be called concurrently.
        """
        from agentlightning.store.client_server import LightningStoreServer  # a web stack that other roles do not need

        server = LightningStoreServer(store, self.host, self.port)
        try:
            server.bind()
        except RuntimeError as error:
            if not (self.may_move and getattr(error.__cause__, "errno", None) == errno.EADDRINUSE):
                raise
            server = LightningStoreServer(store, self.host, 0)
            server.bind()
            logger.info("Port %d is in use; the store server of this run takes %s", self.port, server.endpoint)
        return server

    def settled(self) -> Address:
        """Return this address with the port that a server in another process will be able to bind.

        Raises:
            RuntimeError: the address cannot be bound.
        """
        with socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except OSError as error:
                if not (self.may_move and error.errno == errno.EADDRINUSE):
                    text = f"Cannot listen on {self.host}:{self.port}: {error}. Choose another server_port."
                    raise RuntimeError(text) from error
                probe.bind((self.host, 0))
            return self.at(int(probe.getsockname()[1]))

    async def until_listening(self) -> None:
        """Return once something accepts connections there. The caller sets the limit."""
        pause = 0.01
        while True:
            try:
                _, writer = await asyncio.open_connection(self.target, self.port)
            except OSError:
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, PAUSE_CEILING_SECONDS)
            else:
                writer.close()
                return
