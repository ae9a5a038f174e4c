"""The keeper of a runner's programs: a small process that starts them and ends all their processes.

It runs as a script and imports nothing of the package, so that a program only needs the fork of a small process. For
each program it forks a parent, which adopts orphaned descendants (a child subreaper, prctl(2), Linux), even those in
their own session. On request, or when the runner ends, the parent kills all of them. The keeper does the same for a
parent that a program has killed, and at the end of the runner for all remaining processes.

A program in a sandbox gets its own network namespace first: its loopback device has the addresses of the request, and
the runner gets the listening sockets.

Runner and parent exchange messages over a socket. The runner sends a `Request` (length, then JSON). It gets one line
each: `ready N` from the parent; `pid N` from the program's process before it executes the program, and `net N` with the
sockets of a sandbox; `exit N`. The runner
checks the sender of each (unix(7), credentials). `T` sends SIGTERM to the program's group; `K`, or the end of the
socket, kills all processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Collection, Iterator, Set
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_LINUX = sys.platform == "linux"
_KILL_SECONDS = 10.0
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCSIFADDR, _IFF_UP = 0x8913, 0x8914, 0x8916, 1
_SHELL = 'exec "$@"'
"""Run by `sh`, which becomes the program: this also runs a script without an interpreter line."""


def main(descriptor: int) -> None:
    """Start a parent for every four received descriptors (input, both outputs, its socket), until the runner ends."""
    runner = os.pidfd_open(os.getppid()) if hasattr(os, "pidfd_open") else None
    _prctl(_PR_SET_DUMPABLE, 0)  # parents too: no program may read their memory or copy their sockets
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)  # it may be stopped when the runner ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = socket.socket(fileno=descriptor)
    server.set_inheritable(False)
    woken = _wakes_at_the_end_of_a_child()
    poll = _poll(server.fileno(), woken, runner)
    parents: set[int] = set()
    while runner not in (ready := {descriptor for descriptor, _ in poll.poll()}):
        if woken in ready:
            ended = dict(_ended(woken))
            failed = any(ended[parent] for parent in parents & ended.keys())
            parents -= ended.keys()
            if failed:  # a program has killed it
                _kill_all(parents)
        if server.fileno() in ready:
            message, descriptors, _, _ = socket.recv_fds(server, 1, 4)
            if not message:
                break
            for each in descriptors:
                os.set_inheritable(each, False)
            parent = os.fork()
            if parent == 0:
                try:
                    server.close()
                    _keep(descriptors, runner)
                finally:
                    os._exit(0)
            parents.add(parent)
            for each in descriptors:
                os.close(each)
    _kill_all()
    os._exit(0)


def _poll(*descriptors: int | None) -> select.poll:
    poll = select.poll()
    for descriptor in descriptors:
        if descriptor is not None:
            poll.register(descriptor, select.POLLIN)
    return poll


def _wakes_at_the_end_of_a_child() -> int:
    """Return a descriptor that can be read once a child of this process has ended."""
    woken, wakes = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, _woken)
    return woken


def _woken(number: int, frame: object) -> None:
    """Do nothing: an ignored signal would not wake the poll."""


def _ended(woken: int) -> Iterator[tuple[int, int]]:
    """Reap the children that have ended; yield each with its status."""
    with contextlib.suppress(BlockingIOError):
        os.read(woken, 4096)
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
            yield ended


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
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)  # it may be stopped when the keeper ends
    woken = _wakes_at_the_end_of_a_child()
    us = os.getpid()
    control.sendall(f"ready {us}\n".encode())  # the runner may have given up: then start nothing
    leader = os.fork()
    if leader == 0:
        control.sendall(f"pid {os.getpid()}\n".encode())
        _become(request, streams, us, control)
    for stream in streams:
        os.close(stream)
    try:
        _watch(control, leader, woken, runner)
    finally:
        with contextlib.suppress(OSError):
            os.killpg(leader, signal.SIGKILL)
        _kill_all()


def _request(control: socket.socket) -> dict[str, object] | None:
    data = b""
    while len(data) < 4 or len(data) < 4 + struct.unpack("!I", data[:4])[0]:
        part = control.recv(1 << 16)
        if not part:
            return None
        data += part
    return json.loads(data[4:])


def _become(request: dict[str, Any], streams: list[int], parent: int, control: socket.socket) -> None:
    """Replace this process with the program. Does not return."""
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        for each in (signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(each, signal.SIG_DFL)
        if hasattr(signal, "SIGXFSZ"):
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        os.setsid()
        sandbox = request["sandbox"]
        if sandbox is not None and sandbox["memory"] is not None:
            with open(sandbox["memory"], "w") as file:  # of this process, and so of all that it starts
                file.write(str(os.getpid()))
        if request["user"] is not None:
            uid, gid = request["user"]
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
            _prctl(_PR_SET_NO_NEW_PRIVS, 1)  # no return to root through sudo and the like
        if sandbox is not None:
            _own_network(sandbox["listen"], control)
            if sandbox["processes"] is not None:  # counted per user namespace
                resource.setrlimit(resource.RLIMIT_NPROC, (sandbox["processes"], sandbox["processes"]))
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            os.chdir(request["cwd"])
            os.execve("/bin/sh", ["/bin/sh", "-c", _SHELL, "sh", *request["command"]], request["env"])
    except OSError as error:
        os.write(2, f"cannot be started: {error}\n".encode())
    os._exit(126)


def _own_network(listen: list[tuple[str, int]], control: socket.socket) -> None:
    """Move this process into a new network namespace and send the runner a listening socket for each address in it."""
    uid, gid = os.getuid(), os.getgid()
    _prctl(_PR_SET_DUMPABLE, 1)  # otherwise only root may write the files below
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "this system allows no user namespace")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(device, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(device, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))
        further = dict.fromkeys(host for host, _ in listen if "." in host and not host.startswith("127."))
        for number, host in enumerate(further):
            place = struct.pack("16sHH4s8x", f"lo:{number}".encode(), socket.AF_INET, 0, socket.inet_aton(host))
            fcntl.ioctl(device, _SIOCSIFADDR, place)
    sockets = [socket.create_server((host, port), family=_family(host), backlog=128) for host, port in listen]
    socket.send_fds(control, [f"net {os.getpid()}\n".encode()], [each.fileno() for each in sockets])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _watch(control: socket.socket, leader: int, woken: int, runner: int | None) -> None:
    """Reap ended processes and execute requests, until all processes have to be killed."""
    poll = _poll(control.fileno(), woken, runner)
    alive = True
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if runner in ready:
            return
        if woken in ready:
            for pid, status in _ended(woken):
                if pid == leader:
                    alive = False
                    _report(control, f"exit {os.waitstatus_to_exitcode(status)}\n")
        if control.fileno() in ready:
            request = control.recv(16)
            if not request or b"K" in request:
                return
            if alive:
                with contextlib.suppress(OSError):
                    os.killpg(leader, signal.SIGTERM)


def _report(control: socket.socket, text: str) -> None:
    with contextlib.suppress(OSError):  # the runner has ended, which the watch notices
        control.sendall(text.encode())


# --- the end ---------------------------------------------------------------------------------------------------------


def _kill_all(spared: Set[int] | None = None) -> None:
    """Kill every descendant of this process, except the `spared` children and their descendants. Descendants are
    stopped first, so that they cannot fork."""
    until = time.monotonic() + _KILL_SECONDS
    while (_has_children() if spared is None else _descendants(spared)) and time.monotonic() < until:
        stopped: set[int] = set()
        while new := set(_descendants(spared or ())) - stopped:
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


def _descendants(spared: Collection[int]) -> list[int]:
    """Return every live descendant of this process, except the `spared` children and their descendants."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if _LINUX else ():
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state != b"Z":
                    children.setdefault(int(parent), []).append(int(name))
    pids = [child for child in children.get(os.getpid(), []) if child not in spared]
    for pid in pids:
        pids.extend(children.get(pid, []))
    return pids


if __name__ == "__main__":
    main(int(sys.argv[1]))
