"""Secrets of this process: removed from its environment on first use, and kept only in memory.

Every process of the same user can read the initial environment of a process in `/proc/PID/environ`, and child processes
inherit the environment. So a secret is removed from both. On Linux, a process with a secret also becomes not dumpable:
other processes of the same user cannot read its environment or memory. Forked children inherit the secrets and the
protection. Processes started by `exec` inherit neither; pass `Handed()` to a child that needs the secrets.
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
    """Return a secret from the variable `name`, from the file in the variable `name`_FILE, or stored earlier.

    Both variables are removed from the environment. A value that is set later replaces the stored one.

    Raises:
        ValueError: both are set; or the file cannot be read, is empty or too long, or other users can read it.
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
    """Return the token that servers require and clients send; None if it is unset or empty.

    Raises:
        ValueError: same as `secret`.
    """
    return (secret(TOKEN) or "").strip() or None


def hold(name: str, value: str) -> None:
    """Store a secret from another source, and protect the process."""
    with _lock:
        _held[name] = value
        _leave_environment(name)
    if value:
        protect()


def hide(text: str) -> None:
    """Overwrite a secret in the command line of this process, which all users can read, and protect the process."""
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
    """Remove a variable from the environment of a process that does not need it. A stored secret is kept."""
    with _lock:
        _leave_environment(name)


def forget() -> None:
    """Forget all secrets. Copies in other objects remain."""
    with _lock:
        _held.clear()


def held_values() -> frozenset[str]:
    """Return the stored secrets, for code that removes them from the output of this process."""
    with _lock:
        return frozenset(value.strip() for value in _held.values())


class Handed:
    """The secrets of this process, for a spawned child. Unpickling it in the child stores the secrets there."""

    def __reduce__(self) -> tuple[object, ...]:
        return _receive, (dict(_held),)


def _receive(secrets: dict[str, str]) -> Handed:
    for name, value in secrets.items():
        hold(name, value)
    return Handed()


def protect_early() -> None:
    """Protect this process if it was started with the token. Call this before any slow import."""
    if TOKEN in os.environ:
        protect()


def protect() -> bool:
    """Make this process not dumpable: other processes of the same user cannot read its environment or memory.

    They also cannot trace it, the kernel writes no core dump, and debuggers and profilers need root to attach. Returns
    False if the system does not support this.
    """
    if sys.platform != "linux":
        logger.debug("This system cannot prevent other processes of the same user from reading this process")
        return False
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        logger.warning(
            "Other processes of the same user can read this process, which holds secrets: prctl failed: %s",
            os.strerror(ctypes.get_errno()),
        )
        return False
    return True


# --- out of the environment ------------------------------------------------------------------------------------------


def _leave_environment(name: str) -> None:
    """Remove the variable and its `_FILE` variable, and overwrite their initial values in `/proc/self/environ`."""
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
    """Return the secret in a regular file that other users cannot read, or in a pipe with a writer.

    `named` is the name of the file in messages. Waits at most ten seconds for the writer of a pipe.

    Raises:
        ValueError: the file cannot be read, is empty or too long, or other users can read it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise ValueError(f"{named}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        is_file = stat.S_ISREG(status.st_mode)
        if not (is_file or stat.S_ISFIFO(status.st_mode)):
            raise ValueError(f"{named} is neither a regular file nor a pipe")
        has_owners = hasattr(os, "geteuid")  # false on Windows, which has no modes either
        ours = has_owners and status.st_uid == os.geteuid()
        forbidden = status.st_mode & (0o077 if ours else 0o007)  # root may share a file with our group
        if is_file and has_owners and forbidden:
            mode = stat.S_IMODE(status.st_mode)
            raise ValueError(f"Other users can read {named} (mode {mode:04o}); expected 0600: run chmod 600 {path}")
        text = _whole(descriptor).decode("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{named} cannot be read: {error}") from error
    finally:
        os.close(descriptor)
    if not text:
        raise ValueError(f"{named} is empty; expected the secret as text")
    return text


def _whole(descriptor: int) -> bytes:
    """Read a descriptor to its end.

    Raises:
        OSError: there is too much data, or it does not end in time.
    """
    until, read = time.monotonic() + _WAIT_SECONDS, b""
    while len(read) <= _MOST_BYTES:
        if hasattr(os, "O_NONBLOCK"):  # Windows can select sockets only
            select.select([descriptor], [], [], max(until - time.monotonic(), 0.0))
        try:
            part = os.read(descriptor, _MOST_BYTES + 1 - len(read))
        except BlockingIOError:
            raise TimeoutError(f"the writer did not close it within {_WAIT_SECONDS:g} s") from None
        if not part:
            return read
        read += part
    raise OSError(f"it has more than {_MOST_BYTES} bytes")
