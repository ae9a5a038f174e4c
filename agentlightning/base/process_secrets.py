"""Secrets of this process: removed from its environment on first use, and kept in memory only.

`/proc/PID/environ` shows the environment with which a process was started to every process of the same user, and
child processes inherit it. So a secret is removed from both, and a process that holds one is made not dumpable
(Linux): others of the same user can then read neither its environment nor its memory. Forked children inherit secret
and protection. Processes started by `exec` inherit neither; a child that needs the secrets is passed `Handed()`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Iterator

logger = logging.getLogger(__name__)

TOKEN = "AGL_TOKEN"
"""The token that our servers require and our clients send."""
_FILE = "_FILE"
_MOST_BYTES = 4096
_WAIT_SECONDS = 10.0
_PR_SET_DUMPABLE = 4
_ARGUMENTS, _ENVIRONMENT = slice(45, 47), slice(47, 49)
"""Slices of `/proc/self/stat` after the name: first and last address of the arguments, and of the environment."""

_held: dict[str, str] = {}
_lock = threading.Lock()


def secret(name: str) -> str | None:
    """Return a secret: the value of the variable `name` or of the file that `name`_FILE names, or the one read earlier.

    Both variables are removed from the environment. A value that is set later replaces the stored one.

    Raises:
        ValueError: both are set; the file cannot be read, is empty or too long, or others may read it.
    """
    if name in os.environ or name + _FILE in os.environ:
        with _lock:
            value, file = os.environ.get(name), os.environ.get(name + _FILE)
            if value and file:
                raise ValueError(f"{name} and {name}{_FILE} are both set; expected one of them")
            if file:
                value = read_secret(file, f"{name}{_FILE}={file}")
            if value is not None:
                _held[name] = value
                _leave_environment(name)
        if value:
            protect()
    return _held.get(name)


def server_token() -> str | None:
    """Return the token that servers require and clients send; None when unset or empty.

    Raises:
        ValueError: same as `secret`.
    """
    return (secret(TOKEN) or "").strip() or None


def hold(name: str, value: str) -> None:
    """Store a secret that was passed in another way, and protect the process."""
    with _lock:
        _held[name] = value
        _leave_environment(name)
    if value:
        protect()


def hide(text: str) -> None:
    """Overwrite a secret in the command line of this process, which every user can see, and protect the process."""
    data = text.encode()
    if not data:
        return
    for address, argument in _initial(_ARGUMENTS):
        place = argument.find(data)
        while place >= 0:
            ctypes.memset(address + place, ord("*"), len(data))
            place = argument.find(data, place + len(data))
    protect()


def discard(name: str) -> None:
    """Remove a variable from the environment of a process that does not need it; a stored secret stays."""
    with _lock:
        _leave_environment(name)


def forget() -> None:
    """Forget every secret. Copies that other objects have made remain."""
    with _lock:
        _held.clear()


def held_values() -> frozenset[str]:
    """Return the stored secrets, for code that hides them in the output of this process."""
    with _lock:
        return frozenset(value.strip() for value in _held.values())


class Handed:
    """The secrets of this process, to be passed to a spawned child: unpickling it there stores them."""

    def __reduce__(self) -> tuple[object, ...]:
        return _receive, (dict(_held),)


def _receive(secrets: dict[str, str]) -> Handed:
    for name, value in secrets.items():
        hold(name, value)
    return Handed()


def protect_early() -> None:
    """Protect this process if it was started with the token; call it before any slow import."""
    if TOKEN in os.environ:
        protect()


def protect() -> bool:
    """Make this process not dumpable: others of the same user cannot read its environment and memory, or trace it.

    Returns False where the system does not support it. The kernel then also writes no core dump, and debuggers and
    profilers that attach from outside need root.
    """
    if sys.platform != "linux":
        logger.debug("This system cannot keep other processes of the same user from reading this one")
        return False
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        logger.warning(
            "This process holds secrets and other processes of the same user can read it: prctl says %s",
            os.strerror(ctypes.get_errno()),
        )
        return False
    return True


# --- out of the environment ------------------------------------------------------------------------------------------


def _leave_environment(name: str) -> None:
    """Remove the variable and that of its file, and overwrite their initial values, which the kernel shows."""
    for variable in (name, name + _FILE):
        head = variable.encode() + b"="
        for address, entry in _initial(_ENVIRONMENT):
            if entry.startswith(head):
                ctypes.memset(address + len(head), 0, len(entry) - len(head))
        os.environ.pop(variable, None)


def _initial(which: slice) -> Iterator[tuple[int, bytes]]:
    """Yield address and text of each argument or variable that the process was started with. See proc_pid_stat(5)."""
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        start, end = map(int, fields[which])
    except (OSError, ValueError, IndexError):  # not Linux, or a kernel that hides the addresses
        return
    if not 0 < start < end:
        return
    address = start
    for entry in ctypes.string_at(start, end - start).split(b"\0"):
        yield address, entry
        address += len(entry) + 1


# --- files -----------------------------------------------------------------------------------------------------------


def read_secret(path: str, named: str) -> str:
    """Return the secret in a file: a regular one that others cannot read, or a pipe with a writer.

    `named` is its name in messages. Waits at most ten seconds for the writer of a pipe.

    Raises:
        ValueError: it cannot be read, is empty or too long, or others may read it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise ValueError(f"{named}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        is_file = stat.S_ISREG(status.st_mode)
        if not (is_file or stat.S_ISFIFO(status.st_mode)):
            raise ValueError(f"{named} is no file and no pipe")
        has_owners = hasattr(os, "geteuid")  # false on Windows, which has no modes either
        ours = has_owners and status.st_uid == os.geteuid()
        forbidden = status.st_mode & (0o077 if ours else 0o007)  # root may share a file with our group
        if is_file and has_owners and forbidden:
            mode = stat.S_IMODE(status.st_mode)
            raise ValueError(f"{named} may be read by other users (mode {mode:04o}); make it 0600: chmod 600 {path}")
        text = _whole(descriptor).decode("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{named} cannot be read: {error}") from error
    finally:
        os.close(descriptor)
    if not text:
        raise ValueError(f"{named} is empty; expected the secret, as text")
    return text


def _whole(descriptor: int) -> bytes:
    """Read a descriptor to its end.

    Raises:
        ValueError: there is too much, or it does not end in time.
    """
    until, read = time.monotonic() + _WAIT_SECONDS, b""
    while len(read) <= _MOST_BYTES:
        if hasattr(os, "O_NONBLOCK"):  # Windows can select sockets only
            select.select([descriptor], [], [], max(until - time.monotonic(), 0.0))
        try:
            part = os.read(descriptor, _MOST_BYTES + 1 - len(read))
        except BlockingIOError:
            raise TimeoutError(f"its writer has not closed it within {_WAIT_SECONDS:g} s") from None
        if not part:
            return read
        read += part
    raise OSError(f"it holds more than {_MOST_BYTES} bytes")
