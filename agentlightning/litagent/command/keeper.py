"""Programs started by a keeper process: all processes of a program end when it is closed or this process dies."""

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentlightning.utils.descendants import end_descendants, pidfd_of

END_SECONDS = 5.0
"""Seconds to wait for killed processes."""
ANSWER_SECONDS = 10.0
"""Seconds that a keeper may take to start a program, before another keeper is started."""
_TRIES = 3
_PASSED = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""Variables that a Python interpreter may need to start."""
_LONGEST_LINE = 64
MOST_ADDRESSES = 64
"""Maximum number of addresses of a sandbox."""
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a message's sender, as the kernel reports them (Linux)."""
_TELLS_SENDER = hasattr(socket, "SO_PASSCRED")
_SCM_CREDENTIALS: int = getattr(socket, "SCM_CREDENTIALS", -1)
_lock = threading.Lock()


class KeptProgram:
    """A program that is being started. Owned by the running loop; call `close` once in every case.

    A message from the socket is trusted only if the kernel confirms its sender.
    """

    def __init__(self, control: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        """Its exit code; the negative signal number if a signal ended it."""
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self.listeners: asyncio.Future[list[socket.socket]] = self._loop.create_future()
        """The listening sockets of its sandbox; cancelled if it has ended without them."""
        self._control = control
        self._partial_line = b""
        self._parent: int | None = None
        self._leader: int | None = None
        self._ends: dict[int, int] = {}
        """Descriptors by process id; each becomes readable when its process ends."""
        control.setblocking(False)
        if _TELLS_SENDER:
            control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._loop.add_reader(control, self._read)

    async def start(self, request: bytes) -> bool:
        """Send the request, and return whether the program was started within `ANSWER_SECONDS`."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._loop.sock_sendall(self._control, struct.pack("!I", len(request)) + request)
                await asyncio.wait({self._started, self._gone}, return_when=asyncio.FIRST_COMPLETED)
        except OSError:  # the keeper has ended, or does not answer
            pass
        return self._started.done()

    def terminate(self) -> None:
        """Send SIGTERM to its process group."""
        self._ask(b"T")

    def kill(self) -> None:
        """Kill the program and all its descendants, in any session."""
        self._ask(b"K")

    async def close(self) -> None:
        """Kill the remaining processes and wait for their end, at most twice `END_SECONDS`."""
        try:
            self.kill()
            await asyncio.wait({self._gone}, timeout=END_SECONDS)
            if not self._gone.done() and self._parent is not None:  # the program blocks it
                await asyncio.to_thread(self._kill_from_here)
                await asyncio.wait({self._gone}, timeout=END_SECONDS)
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Close the socket, which makes the keeper kill the program. Does not wait."""
        self._ended_with(-signal.SIGKILL)
        self._loop.remove_reader(self._control)
        self._control.close()
        if self._has_listeners():
            for listener in self.listeners.result():
                listener.close()
        for end in self._ends.values():
            self._loop.remove_reader(end)
            os.close(end)
        self._ends.clear()

    def _ask(self, what: bytes) -> None:
        self._wake()
        with contextlib.suppress(OSError):  # it has ended
            self._control.send(what)

    def _wake(self) -> None:
        """Continue the program's parent process, in case a program of the same user has stopped it."""
        if self._parent in self._ends:
            with contextlib.suppress(OSError):  # it has ended
                signal.pidfd_send_signal(self._ends[self._parent], signal.SIGCONT)

    def _kill_from_here(self) -> None:
        assert self._parent is not None
        end_descendants(self._parent, grace=0.0)
        with contextlib.suppress(OSError):
            os.kill(self._parent, signal.SIGKILL)
        end_descendants(self._parent, grace=0.0)

    # --- messages ----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            space = socket.CMSG_SPACE(_CREDENTIALS.size) if _TELLS_SENDER else 0
            data, about, _, _ = self._control.recvmsg(4096, space + socket.CMSG_SPACE(4 * MOST_ADDRESSES))
        except BlockingIOError:
            return
        except OSError:
            data, about = b"", []
        received = [
            socket.socket(fileno=number)
            for _, kind, body in about
            if kind == socket.SCM_RIGHTS
            for number in struct.unpack(f"{len(body) // 4}i", body)
        ]
        try:
            self._take_message(data, about, received)
        finally:
            if not (self._has_listeners() and self.listeners.result() is received):
                for each in received:
                    each.close()

    def _has_listeners(self) -> bool:
        return self.listeners.done() and not self.listeners.cancelled()

    def _take_message(self, data: bytes, about: list[tuple[int, int, bytes]], received: list[socket.socket]) -> None:
        if not data:
            self._end()
        elif not self.exited.done():
            sender = next((_CREDENTIALS.unpack(body)[0] for _, kind, body in about if kind == _SCM_CREDENTIALS), None)
            *lines, self._partial_line = (self._partial_line + data).split(b"\n")
            try:
                for line in (*lines, *([] if len(self._partial_line) <= _LONGEST_LINE else [self._partial_line])):
                    self._take(line, sender, received)
            except ValueError:  # not a message of ours: the program has the socket
                self._ended_with(-signal.SIGKILL)

    def _take(self, line: bytes, sender: int | None, received: list[socket.socket]) -> None:
        """Process one line.

        Raises:
            ValueError: the line is not allowed in this state, or from this sender.
        """
        word, _, text = line[: _LONGEST_LINE + 1].partition(b" ")
        number = int(text)
        if word == b"ready" and self._parent is None and sender in (None, number) and number > 1:
            self._parent = number
            self._watch(number)
        elif word == b"pid" and self._parent and self._leader is None and sender in (None, number) and number > 1:
            self._leader = number
            self._watch(number, self._leader_ended)
            self._started.set_result(None)
        elif word == b"net" and self._leader == number and sender in (None, number) and not self.listeners.done():
            self.listeners.set_result(received)
        elif word == b"exit" and self._leader is not None and sender in (None, self._parent):
            self._ended_with(number)
        else:
            raise ValueError(line)

    def _watch(self, pid: int, ended: Callable[[], None] | None = None) -> None:
        if (end := pidfd_of(pid)) is not None:
            self._ends[pid] = end
            if ended is not None:
                self._loop.add_reader(end, ended)

    def _leader_ended(self) -> None:
        """Wait for the exit code, at most `END_SECONDS`."""
        assert self._leader is not None
        self._loop.remove_reader(self._ends[self._leader])
        self._wake()
        self._loop.call_later(END_SECONDS, self._ended_with, -signal.SIGKILL)

    def _ended_with(self, code: int) -> None:
        if not self.exited.done():
            self.exited.set_result(code)
        self.listeners.cancel()

    def _end(self) -> None:
        self._loop.remove_reader(self._control)
        if not self.exited.done() and self._leader is not None:  # the keeper was killed, perhaps by the program
            with contextlib.suppress(OSError):
                os.killpg(self._leader, signal.SIGKILL)
        self._ended_with(-signal.SIGKILL)
        if not self._gone.done():
            self._gone.set_result(None)


async def start_kept(
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    streams: Sequence[int],
    user: tuple[int, int] | None,
    sandbox: Mapping[str, Any] | None = None,
) -> KeptProgram:
    """Start a program with these descriptors as input, output and error output. Close them in this process.

    Raises:
        OSError: no keeper can be started, or none responds.
    """
    request = json.dumps(
        {"command": list(command), "env": dict(env), "cwd": cwd, "user": user, "sandbox": sandbox}
    ).encode()
    try:
        for _ in range(_TRIES):
            keeper = _present_keeper()
            ours, theirs = socket.socketpair()
            program = KeptProgram(ours)
            try:
                with theirs:
                    handed_over = keeper.hand_over([*streams, theirs.fileno()])
                if handed_over and await program.start(request):
                    return program
            except BaseException:  # also a cancellation: nothing else closes our end
                program.give_up()
                raise
            program.give_up()
            _replace(keeper)
        raise OSError(f"{_TRIES} keeper processes in a row were stopped or killed")
    finally:
        for stream in streams:
            os.close(stream)


class _Keeper:
    """The keeper of this process. Ends when its socket is closed, or when this process ends."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(ANSWER_SECONDS)
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

    def hand_over(self, descriptors: Sequence[int]) -> bool:
        """Send the descriptors; return False if the keeper has ended or does not accept them."""
        self._process.send_signal(signal.SIGCONT)  # a program of the same user may have stopped it
        try:
            socket.send_fds(self._socket, [b"p"], list(descriptors))
        except OSError:
            return False
        return True

    def close(self) -> None:
        """End the keeper and all remaining programs."""
        self._socket.close()
        if self.pid == os.getpid():
            self._process.send_signal(signal.SIGCONT)
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """Kill only the keeper: the programs continue, each below its own parent process."""
        atexit.unregister(self.close)
        self._process.kill()
        self._process.wait()
        self._socket.close()


_keeper: _Keeper | None = None


def _present_keeper() -> _Keeper:
    global _keeper
    with _lock:
        if _keeper is None or _keeper.pid != os.getpid():
            _keeper = _Keeper()
            atexit.register(_keeper.close)
        return _keeper


def _replace(keeper: _Keeper) -> None:
    """End this keeper, even if a program has stopped it. The next program starts another one."""
    global _keeper
    with _lock:
        if _keeper is keeper:
            _keeper = None
            keeper.kill()
