"""The keeper of a runner's programs: a small process that starts them, and leaves nothing of them behind.

Run as a script, and imports nothing of the package, so that a program costs a fork of something small. For each one it
forks a parent, which adopts whatever the program's processes leave behind (a child subreaper, prctl(2), Linux), also
what went into a session of its own. When it is told to, or when the runner is gone, the parent kills all of it.

Messages of runner and parent, over a socket: a `Request` (length, then JSON); `pid N` and `exit N` back, a line each;
then `T` asks the program's group to end, `K`, or the end of the socket, kills everything.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38
_LINUX = sys.platform == "linux"
_KILL_SECONDS = 10.0
_SHELL = 'exec "$@"'
"""Run by `sh`, which becomes the program: it also runs a script that names no interpreter."""


def main(descriptor: int) -> None:
    """Start a parent for each four descriptors that come (input, both outputs, its socket), until the runner ends."""
    runner = os.pidfd_open(os.getppid()) if hasattr(os, "pidfd_open") else None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the parents
    server = socket.socket(fileno=descriptor)
    while True:
        message, descriptors, _, _ = socket.recv_fds(server, 1, 4, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
        if not message:
            os._exit(0)
        if os.fork() == 0:
            try:
                server.close()
                _keep(descriptors, runner)
            finally:
                os._exit(0)
        for each in descriptors:
            os.close(each)


def _prctl(option: int, value: int) -> None:
    if _LINUX:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# --- the parent of one program ---------------------------------------------------------------------------------------


def _keep(descriptors: list[int], runner: int | None) -> None:
    *streams, descriptor = descriptors
    control = socket.socket(fileno=descriptor)
    request = _request(control)
    if request is None:
        return
    os.setsid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    woken, wakes = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, _woken)
    us = os.getpid()
    leader = os.fork()
    if leader == 0:
        _become(request, streams, us)
    for stream in streams:
        os.close(stream)
    try:
        _report(control, f"pid {leader}\n")
        _watch(control, leader, woken, runner)
    finally:
        _kill_all(leader)


def _woken(number: int, frame: object) -> None:
    """A signal that is ignored wakes nobody."""


def _request(control: socket.socket) -> dict[str, object] | None:
    data = b""
    while len(data) < 4 or len(data) < 4 + struct.unpack("!I", data[:4])[0]:
        part = control.recv(1 << 16)
        if not part:
            return None
        data += part
    return json.loads(data[4:])


def _become(request: dict[str, Any], streams: list[int], parent: int) -> None:
    """Turn this process into the program; does not return."""
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        for each in (signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(each, signal.SIG_DFL)
        if hasattr(signal, "SIGXFSZ"):
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        os.setsid()
        if request["user"] is not None:
            uid, gid = request["user"]
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
            _prctl(_PR_SET_NO_NEW_PRIVS, 1)  # no way back by sudo and the like
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            os.chdir(request["cwd"])
            os.execve("/bin/sh", ["/bin/sh", "-c", _SHELL, "sh", *request["command"]], request["env"])
    except OSError as error:
        os.write(2, f"cannot be started: {error}\n".encode())
    os._exit(126)


def _watch(control: socket.socket, leader: int, woken: int, runner: int | None) -> None:
    """Reap what ends and do what is asked, until all is to be killed."""
    poll = select.poll()
    for descriptor in (control.fileno(), woken, *(() if runner is None else (runner,))):
        poll.register(descriptor, select.POLLIN)
    alive = True
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if runner in ready:
            return
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                    if ended[0] == leader:
                        alive = False
                        _report(control, f"exit {os.waitstatus_to_exitcode(ended[1])}\n")
        if control.fileno() in ready:
            asked = control.recv(16)
            if not asked or b"K" in asked:
                return
            if alive:
                with contextlib.suppress(OSError):
                    os.killpg(leader, signal.SIGTERM)


def _report(control: socket.socket, text: str) -> None:
    with contextlib.suppress(OSError):  # the runner is gone, which the watch notices
        control.sendall(text.encode())


# --- the end ---------------------------------------------------------------------------------------------------------


def _kill_all(leader: int) -> None:
    """Kill the program's group and every descendant of this process. What was stopped first cannot fork meanwhile."""
    with contextlib.suppress(OSError):
        os.killpg(leader, signal.SIGKILL)
    until = time.monotonic() + _KILL_SECONDS
    while _has_children() and time.monotonic() < until:
        stopped: set[int] = set()
        while new := set(_descendants()) - stopped:
            _signal(new, signal.SIGSTOP)
            stopped |= new
        _signal(stopped, signal.SIGKILL)
        time.sleep(0.001)


def _has_children() -> bool:
    try:
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
    except ChildProcessError:
        return False
    return True


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or belongs to root
            os.kill(pid, number)


def _descendants() -> list[int]:
    """Return every living process below this one."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if _LINUX else ():
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state != b"Z":
                    children.setdefault(int(parent), []).append(int(name))
    found = [*children.get(os.getpid(), [])]
    for pid in found:
        found.extend(children.get(pid, []))
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]))
