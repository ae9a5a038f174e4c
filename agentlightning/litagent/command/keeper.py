"""Programs started by a keeper, a process beside this one: each ends as a whole when it is closed or we die."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

END_SECONDS = 5.0
"""How long is waited for what has been killed."""
_PASSED = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""What a Python may need to start."""
_lock = threading.Lock()


class KeptProgram:
    """A program that was started. Belongs to the running loop; `close` is called once, whatever happened."""

    def __init__(self, control: socket.socket) -> None:
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Its exit code, minus the number of a signal that ended it."""
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._control = control
        self._partial_line = b""
        self._leader: int | None = None
        control.setblocking(False)
        asyncio.get_running_loop().add_reader(control, self._read)

    def terminate(self) -> None:
        """Send SIGTERM to its process group."""
        self._ask(b"T")

    def kill(self) -> None:
        """Kill it with everything that it has started, in whatever session that is."""
        self._ask(b"K")

    async def close(self) -> None:
        """Kill what is left and wait until it is gone, at most `END_SECONDS`."""
        try:
            self.kill()
            await asyncio.wait({self._gone}, timeout=END_SECONDS)
        finally:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()

    def _ask(self, what: bytes) -> None:
        with contextlib.suppress(OSError):  # it is gone
            self._control.send(what)

    def _read(self) -> None:
        try:
            data = self._control.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            word, _, number = line.partition(b" ")
            if word == b"pid":
                self._leader = int(number)
            elif not self.exited.done():
                self.exited.set_result(int(number))
        if not data:
            self._end()

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._control)
        if not self.exited.done():  # it was killed over there, perhaps by the program
            if self._leader is not None:
                with contextlib.suppress(OSError):
                    os.killpg(self._leader, signal.SIGKILL)
            self.exited.set_result(-signal.SIGKILL)
        if not self._gone.done():
            self._gone.set_result(None)


def start_kept(
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    streams: Sequence[int],
    user: tuple[int, int] | None,
) -> KeptProgram:
    """Start a program with these descriptors as input, output and error output, which are closed here.

    Raises:
        OSError: there can be no keeper.
    """
    ours, theirs = socket.socketpair()
    try:
        _hand_over([*streams, theirs.fileno()])
        request = json.dumps({"command": list(command), "env": dict(env), "cwd": cwd, "user": user}).encode()
        ours.sendall(struct.pack("!I", len(request)) + request)
    except BaseException:  # also a cancellation: nobody else closes our end
        ours.close()
        raise
    finally:
        theirs.close()
        for stream in streams:
            os.close(stream)
    return KeptProgram(ours)


class _Keeper:
    """The keeper of this process. Ends when its socket does, or when this process does."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(__file__).with_name("keeper_main.py")), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={name: os.environ[name] for name in _PASSED if name in os.environ},
                cwd="/",
                start_new_session=True,
            )

    def hand_over(self, descriptors: Sequence[int]) -> None:
        socket.send_fds(self._socket, [b"p"], list(descriptors))

    def close(self) -> None:
        self._socket.close()
        if self.pid == os.getpid():
            self._process.wait()


_keeper: _Keeper | None = None


def _hand_over(descriptors: Sequence[int]) -> None:
    global _keeper
    with _lock:
        if _keeper is None or _keeper.pid != os.getpid():
            _keeper = _new()
        try:
            _keeper.hand_over(descriptors)
        except BrokenPipeError:  # somebody killed it
            _keeper.close()
            _keeper = _new()
            _keeper.hand_over(descriptors)


def _new() -> _Keeper:
    keeper = _Keeper()
    atexit.register(keeper.close)
    return keeper
