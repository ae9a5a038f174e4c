"""Make this process look like another system to our package: without the modules and functions that only Linux has.

    hide("darwin")   # no /proc, no prctl, no pidfd, no fork server of Linux
    hide("win32")    # and none of what POSIX has: fcntl, resource, fork, signals beside SIGINT and SIGTERM

What the standard library and the packages of others need is loaded first, so that only our code meets the lack. It is
no Windows: paths, sockets and processes stay those of this machine. The workflow `check.yml` runs the same tests there.
"""

from __future__ import annotations

import asyncio
import builtins
import ctypes
import importlib.util
import multiprocessing.popen_spawn_posix
import os
import select
import signal
import sys
import sysconfig
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import Any, Literal, NoReturn

System = Literal["darwin", "win32"]

OTHERS = (
    "aiohttp.web",
    "concurrent.futures.thread",
    "h11",
    "httptools",
    "logging.handlers",
    "multiprocessing.connection",
    "multiprocessing.resource_tracker",
    "opentelemetry.sdk.trace.export",
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2",
    "prometheus_client",
    "psutil",
    "pydantic",
    "rich.console",
    "rich.live",
    "rich.traceback",
    "sqlite3.dbapi2",
    "starlette.responses",
    "subprocess",
    "tempfile",
    "typer",
    "uvicorn.protocols.http.httptools_impl",
    "uvicorn.server",
)

OF_EXTRAS = ("pymongo", "psycopg")
"""Loaded before anything is hidden, the second where they are installed: they ask for the system themselves."""

LINUX_ONLY: dict[Any, str] = {
    os: "pidfd_open O_PATH O_TMPFILE memfd_create eventfd sched_setaffinity sched_getaffinity posix_fadvise setns",
    select: "epoll",
    signal: "SIGPWR SIGSTKFLT pidfd_send_signal SIGRTMIN SIGRTMAX sigwaitinfo sigtimedwait",
}
POSIX_ONLY: dict[Any, str] = {
    os: (
        "fork forkpty killpg getpgid setpgid setsid getsid getuid geteuid getgid getegid setuid setgid "
        "setgroups fchown chown lchown waitid wait wait3 wait4 WNOHANG WEXITED WNOWAIT P_ALL P_PID O_NOFOLLOW "
        "O_DIRECTORY O_CLOEXEC O_NONBLOCK O_NOCTTY uname getloadavg mkfifo nice sendfile sync openpty register_at_fork"
    ),
    select: "poll epoll",
    time: "pthread_getcpuclockid clock_gettime clock_settime CLOCK_THREAD_CPUTIME_ID CLOCK_MONOTONIC",
    signal: (
        "SIGKILL SIGHUP SIGCHLD SIGSTOP SIGCONT SIGQUIT SIGPIPE SIGALRM SIGUSR1 SIGUSR2 SIG_BLOCK SIG_UNBLOCK "
        "SIG_SETMASK pthread_sigmask pthread_kill setitimer alarm sigwait siginterrupt"
    ),
}
POSIX_MODULES = ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty", "uvloop")


def _ours(depth: int = 2) -> bool:
    return str(sys._getframe(depth).f_globals.get("__name__", "")).startswith("agentlightning")


def _without_proc(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, str) and path.startswith("/proc") and _ours():
            raise FileNotFoundError(2, "No such file or directory", path)
        return real(path, *args, **kwargs)

    return call


def _refuse(*_: object, **__: object) -> NoReturn:
    raise NotImplementedError


def _no_library(name: str | None, *args: Any, **kwargs: Any) -> Any:
    if name is None and _ours():
        raise TypeError("LoadLibrary() argument 1 must be str, not None")  # as Windows says
    return _CDLL(name, *args, **kwargs)


_CDLL = ctypes.CDLL


def hide(system: System) -> None:
    """Hide from our package what `system` has not. For the whole of this process, before our package is imported."""
    assert not [name for name in sys.modules if name == "agentlightning"], "agentlightning is imported already"
    for name in (*OTHERS, *filter(importlib.util.find_spec, OF_EXTRAS)):
        importlib.import_module(name)
    asyncio.run(asyncio.sleep(0))
    sysconfig.get_config_vars()
    for names in (LINUX_ONLY, *([POSIX_ONLY] if system == "win32" else [])):
        for module, attributes in names.items():
            for attribute in attributes.split():
                if hasattr(module, attribute):
                    delattr(module, attribute)
    builtins.open = _without_proc(builtins.open)
    os.listdir, os.readlink = _without_proc(os.listdir), _without_proc(os.readlink)
    if system == "win32":
        ctypes.CDLL = _no_library  # pyright: ignore[reportAttributeAccessIssue]
        for name in POSIX_MODULES:
            sys.modules[name] = None  # pyright: ignore[reportArgumentType] -- Python then says that there is none
        asyncio.SelectorEventLoop.add_signal_handler = _refuse
        resource_tracker._HAVE_SIGMASK = False  # pyright: ignore[reportAttributeAccessIssue]
    sys.platform = system
    assert multiprocessing.popen_spawn_posix  # what starts a child here, whatever the system is called
