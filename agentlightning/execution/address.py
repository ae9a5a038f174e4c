"""Where the store server of a run listens, and how its runners reach it."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from multiprocessing import get_context
from typing import TYPE_CHECKING, NamedTuple

from agentlightning.execution.events import ExecutionEvent
from agentlightning.process_secrets import server_token
from agentlightning.store.base import LightningStore
from agentlightning.utils.http.auth import check_bind
from agentlightning.utils.http.sockets import listen

if TYPE_CHECKING:
    from agentlightning.store.client_server import LightningStoreServer

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 4747
POLL_SECONDS = 0.01
_LOCAL = {"0.0.0.0": LOOPBACK, "localhost": LOOPBACK, "::": "::1"}
"""Where a process of this machine connects when a server binds the key."""


class Address(NamedTuple):
    """Host and port to bind, and the host to connect to."""

    host: str
    port: int
    may_move: bool = False
    """Leave the port for a free one if it is in use: nobody asked for it."""
    connect_host: str | None = None
    """None is `host`, or the loopback address where that is none to connect to."""
    on_listening: Callable[[str], None] | None = None
    """Told the URL of a server once its port is taken; its page is there too."""

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
        return self._replace(port=port, may_move=False)

    def check_free(self) -> None:
        """Return if a server in a child can bind the port that was asked for, as far as can be told before it does.

        Raises:
            RuntimeError: the port is in use, the address cannot be bound, or it is beyond loopback and there is no
                token; says what to do.
        """
        check_bind(self.host, server_token())
        if self.port and not self.may_move:
            listen(self.host, self.port).close()

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
        if self.on_listening is not None:
            self.on_listening(server.endpoint)
        return server


class PortReport:
    """The port that a server in a child process has bound, told to the parent through a pipe.

    The child chooses, because a port that the parent finds free may be another program's by the time the child binds
    it, and a runner that connects there would work for that program's store. Inherited by forked children, and
    picklable for children that are being spawned.
    """

    __slots__ = ("_reader", "_writer")

    def __init__(self) -> None:
        self._reader, self._writer = get_context().Pipe(duplex=False)

    def tell(self, port: int) -> None:
        """Tell the port of a socket that listens."""
        self._writer.send(port)

    async def port(self, event: ExecutionEvent) -> int | None:
        """Wait for the port, and return it; None if the run ends first, as it does when the child dies."""
        while not event.is_set():
            if self._reader.poll():
                return int(self._reader.recv())
            await asyncio.sleep(POLL_SECONDS)
        return None
