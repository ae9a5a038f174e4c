"""Listening sockets: binding with a clear error, release after a fork, and the address for other machines."""

from __future__ import annotations

import errno
import os
import socket
import weakref
from typing import cast

_BACKLOG = 2048
_listening: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def listen(host: str, port: int) -> socket.socket:
    """Return a non-blocking listening socket; port 0 selects a free one. A forked child closes its copy.

    Raises:
        RuntimeError: the address cannot be bound.
    """
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listening.close()
        code = getattr(error, "errno", None)
        reason = os.strerror(code) if code and code > 0 else str(error).rstrip(".")
        if code == errno.EADDRINUSE:
            way = "Another program uses this port (see 'ss -ltnp'): stop it, or use another port."
        elif code == errno.EACCES:
            way = "Ports below 1024 require root: use a higher one."
        else:
            way = "Use an address of this machine, such as 127.0.0.1, and a port from 1 to 65535."
        raise RuntimeError(f"Cannot listen on {host}:{port}: {reason}. {way}") from error
    listening.setblocking(False)
    _listening.add(listening)
    return listening


def outbound_address() -> str:
    """Return the IPv4 address from which this machine reaches others; 127.0.0.1 if it has none. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1: a datagram socket only looks up its route
            return cast(str, probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def bracket(host: str) -> str:
    """Return the host in the form for a URL."""
    return f"[{host}]" if ":" in host else host


def _let_go() -> None:
    """Close the copies in a forked child, so that a port is free as soon as the parent closes it."""
    for listening in list(_listening):
        fd = listening.detach()
        if fd >= 0:
            os.close(fd)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
