"""Ports for servers that tests start in other processes."""

from __future__ import annotations

import contextlib
import random
import socket

_LOW, _HIGH = 20_000, 32_000


def free_port() -> int:
    """Return a port that is free and that no outgoing connection is given while nobody listens there.

    The kernel gives outgoing connections ports from 32,768 on, and `bind` with port 0 takes one of those: by the time
    a server binds it, a connection of another test may have it.
    """
    for port in random.SystemRandom().sample(range(_LOW, _HIGH), 1000):  # other test processes have the same seed
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"no free port between {_LOW} and {_HIGH}")


def is_free(endpoint: str) -> bool:
    """Return whether the port of an address of this machine, `http://127.0.0.1:4747`, can be bound again."""
    host, port = endpoint.removeprefix("http://").split(":")
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            again.bind((host, int(port)))
        except OSError:
            return False
    return True
