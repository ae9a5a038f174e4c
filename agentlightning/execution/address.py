"""The address of the store server of a run: where it listens, and how its runners reach it."""

from __future__ import annotations

import asyncio
import errno
import http.client
import logging
from collections.abc import Callable
from multiprocessing import get_context
from typing import TYPE_CHECKING, NamedTuple

from agentlightning.base.process_secrets import server_token
from agentlightning.execution.events import ExecutionEvent
from agentlightning.store.base import LightningStore
from agentlightning.utils.http.auth import check_bind
from agentlightning.utils.http.sockets import listen

if TYPE_CHECKING:
    from agentlightning.store.client_server import LightningStoreServer

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 4747
POLL_SECONDS = 0.01
ANSWER_SECONDS = 5.0
_LOCAL = {"0.0.0.0": LOOPBACK, "localhost": LOOPBACK, "::": "::1"}
"""The host to which a process on this machine connects, by the host that the server binds."""


class HeldElsewhereError(RuntimeError):
    """Another process with the role `both`, here or on another machine, uses the address and this one joins its run."""


class Address(NamedTuple):
    """Host and port to bind, and the host to connect to."""

    host: str
    port: int
    may_move: bool = False
    """True to use a free port if this one is in use, because the user did not choose it."""
    connect_host: str | None = None
    """Host to connect to. None is `host`, or the loopback address if clients cannot connect to it (such as 0.0.0.0)."""
    joins: str | None = None
    """The address by which other processes find the server. A process that cannot bind it joins the run of the process
    that has bound it. None: a port in use is an error."""
    on_listening: Callable[[str], None] | None = None
    """Called with the URL of the server, which also serves the dashboard, once its port is bound."""

    @property
    def of_the_other(self) -> Address:
        """The address of the process that runs the algorithm of this run."""
        return self._replace(connect_host=self.connect_host or self.joins, joins=None)

    @property
    def target(self) -> str:
        """The host to connect to."""
        return self.connect_host or _LOCAL.get(self.host, self.host)

    @property
    def url(self) -> str:
        """The URL that runners connect to."""
        return f"http://[{self.target}]:{self.port}" if ":" in self.target else f"http://{self.target}:{self.port}"

    def at(self, port: int) -> Address:
        """Return a copy with another port, which is then fixed."""
        return self._replace(port=port, may_move=False)

    def check_free(self) -> None:
        """Check, as far as possible in advance, that a server in a child process can bind the configured port.

        Raises:
            RuntimeError: the port is in use, the address cannot be bound, or it is beyond loopback and no token is
                set.
            HeldElsewhereError: another process uses the address, and this process joins its run.
        """
        check_bind(self.host, server_token())
        self.check_ours()
        if self.port and not self.may_move:
            try:
                listen(self.host, self.port).close()
            except RuntimeError as error:
                self.check_in_the_way(error)
                raise

    def check_ours(self) -> None:
        """Check that the address by which other processes find the server belongs to this machine.

        Raises:
            HeldElsewhereError: the address belongs to another machine.
        """
        if self.joins is not None and self.port:
            try:
                listen(self.joins, 0).close()
            except RuntimeError as error:
                if getattr(error.__cause__, "errno", None) == errno.EADDRNOTAVAIL:
                    raise HeldElsewhereError(f"{self.joins} is not an address of this machine") from error

    def check_in_the_way(self, error: RuntimeError) -> None:
        """Check that the port is not used by another store server with a run that this process can join.

        Raises:
            HeldElsewhereError: another store server uses the port.
        """
        in_use = getattr(error.__cause__, "errno", None) == errno.EADDRINUSE
        if self.joins is not None and not self.may_move and in_use and _is_store(self.target, self.port):
            raise HeldElsewhereError(f"another process on this machine uses port {self.port}") from error

    def bound_server(self, store: LightningStore) -> LightningStoreServer:
        """Return a store server that has bound its port but does not serve yet.

        Raises:
            RuntimeError: the port is in use, or `host` is beyond loopback and no token is set.
            ValueError: the store may not be called concurrently.
            HeldElsewhereError: another process uses the address, and this process joins its run.
        """
        from agentlightning.store.client_server import LightningStoreServer  # a web stack that other roles do not need

        server = LightningStoreServer(store, self.host, self.port)
        self.check_ours()
        try:
            server.bind()
        except RuntimeError as error:
            self.check_in_the_way(error)
            if not (self.may_move and getattr(error.__cause__, "errno", None) == errno.EADDRINUSE):
                raise
            server = LightningStoreServer(store, self.host, 0)
            server.bind()
            logger.info("Port %d is in use; the store server of this run uses %s", self.port, server.endpoint)
        if self.on_listening is not None:
            self.on_listening(server.endpoint)
        return server


def _is_store(host: str, port: int) -> bool:
    """Return whether a store server listens there; also True if the listener does not answer in time."""
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", "/v1/agl/health")
        answer = connection.getresponse()
        return answer.status == 200 and answer.getheader("x-agl-version") is not None
    except TimeoutError:
        return True
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class PortReport:
    """A pipe through which a server in a child process reports its port to the parent.

    The child chooses the port: another program may bind a port that the parent found free before the child does, and
    runners would then connect to that program. Inherited by forked children, and picklable for children that are being
    spawned.
    """

    __slots__ = ("_reader", "_writer")

    def __init__(self) -> None:
        self._reader, self._writer = get_context().Pipe(duplex=False)

    def tell(self, port: int) -> None:
        """Send the port of a listening socket."""
        self._writer.send(port)

    async def port(self, event: ExecutionEvent) -> int | None:
        """Wait for the port, and return it; None if the run ends first, for example because the child dies."""
        while not event.is_set():
            if self._reader.poll():
                return int(self._reader.recv())
            await asyncio.sleep(POLL_SECONDS)
        return None
