"""A bubblewrap sandbox for programs: a read-only system, own namespaces, and a network with only the model's address.

bubblewrap (`bwrap`, https://github.com/containers/bubblewrap) makes the mounts. `keeper_main` creates the network
namespace before that: its loopback device has listening sockets at the addresses of the attempt's models, and this
process forwards their connections. No other connection can leave the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import os
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from agentlightning.base.field_help import explain_fields
from agentlightning.utils.setting_checks import check_count

LINKS = ("bin", "lib", "lib32", "lib64", "sbin")
SYSTEM = (
    *("/usr", "/etc/alternatives", "/etc/ca-certificates", "/etc/group", "/etc/ld.so.cache", "/etc/localtime"),
    *("/etc/nsswitch.conf", "/etc/passwd", "/etc/pki", "/etc/ssl/certs", "/etc/ssl/openssl.cnf"),
)
"""Files and folders of this machine that every sandbox can read."""
NOBODY = 65534
"""User of the programs of a runner that is root and sets no `user`."""
LEAST_MEMORY = 1 << 20
_SCRATCH_BYTES = 1 << 30
_GIVE_UP_SECONDS = 5.0
MOST_CONNECTIONS = 256
"""Maximum number of open connections of a sandbox; further ones are reset."""

Address = tuple[str, int]
"""Host and port."""


@explain_fields
@dataclass(frozen=True, slots=True)
class Bubblewrap:
    """Settings of the sandbox of `CommandAgent(sandbox=...)`.

    The program can read /usr, the basic files of /etc, `read` and its working folder, and write only to the attempt's
    folder and /tmp, which are deleted at the end. It cannot see other processes, and reaches only the models of its
    attempt. This protects a laptop or a CI machine from mistakes of an agent. It is not a barrier against hostile code:
    the program shares the kernel with the host. Use containers or virtual machines for that.

    Raises:
        TypeError, ValueError: a setting is invalid.
    """

    read: Sequence[str] = ()
    """Further files and folders that the program can read, at the same paths; absolute paths."""
    memory_bytes: int | None = None
    """Limit of the memory of all processes in bytes, which requires a control group that the runner can write to."""
    processes: int | None = 512
    """Maximum number of processes and threads; None for no limit."""

    def __post_init__(self) -> None:
        paths: Any = self.read
        if isinstance(paths, (str, bytes)) or not isinstance(paths, Sequence):
            raise TypeError(f"read must be a list of absolute paths; got {paths!r}")
        found = tuple(str(path) for path in cast("Sequence[object]", paths))
        for path in found:
            if not os.path.isabs(path) or "\0" in path or path == "/":
                raise ValueError(f"read must contain absolute paths of files or folders other than /; got {path!r}")
        object.__setattr__(self, "read", found)
        if self.memory_bytes is not None:
            check_count("memory_bytes", self.memory_bytes, minimum=LEAST_MEMORY)
        if self.processes is not None:
            check_count("processes", self.processes)


SandboxName = Literal["bwrap"]


def check_sandbox(sandbox: object) -> Bubblewrap | None:
    """Return the setting `sandbox` of a CommandAgent: None, "bwrap" or a `Bubblewrap`."""
    if sandbox is None or isinstance(sandbox, Bubblewrap):
        return sandbox
    if sandbox == "bwrap":
        return Bubblewrap()
    raise ValueError(f"sandbox must be None, 'bwrap' or agl.Bubblewrap(...); got {sandbox!r}")


@functools.cache
def require_bubblewrap() -> str:
    """Return the path of bwrap after trying it once.

    Raises:
        RuntimeError: bwrap is not installed, or this system does not allow it to create namespaces.
    """
    path = shutil.which("bwrap")
    if path is None:
        raise RuntimeError(
            "sandbox='bwrap' requires the program bwrap (Linux), which is not installed: apt-get install bubblewrap"
        )
    tried = subprocess.run(
        [path, "--unshare-all", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode != 0:
        raise RuntimeError(
            f"sandbox='bwrap' cannot be used here: {tried.stderr.strip() or f'bwrap ended with {tried.returncode}'}. "
            "The system must allow unprivileged user namespaces (in a container: --security-opt seccomp=unconfined)"
        )
    return path


def addresses_of(urls: Iterable[str]) -> list[Address]:
    """Return the host and port of each URL, without duplicates.

    Raises:
        ValueError: a URL has an IPv6 host other than ::1, which a sandbox cannot reach.
    """
    found: dict[Address, None] = {}
    for url in urls:
        parts = urlsplit(url)
        host = parts.hostname or ""
        if ":" in host and host != "::1":
            raise ValueError(f"A sandbox cannot reach {url}: use a host name or an IPv4 address")
        found[host, parts.port or (443 if parts.scheme == "https" else 80)] = None
    return list(found)


@dataclass(frozen=True, slots=True)
class Sandbox:
    """The sandbox of one attempt."""

    settings: Bubblewrap
    folder: Path
    """The attempt's folder, which the program can write to; it contains the file `hosts`."""
    cwd: str | None
    addresses: Sequence[Address]

    @property
    def group_name(self) -> str:
        """Name of the control group that limits the memory."""
        return self.folder.name

    @staticmethod
    def hosts_of(addresses: Iterable[Address]) -> bytes:
        """Return the contents of /etc/hosts in the sandbox: its loopback device has the names of the models."""
        names = dict.fromkeys(["localhost", *(host for host, _ in addresses if not _is_ip(host))])
        return f"127.0.0.1 {' '.join(names)}\n".encode()

    @contextlib.contextmanager
    def limits(self) -> Generator[dict[str, Any]]:
        """Yield what the keeper needs to create the network and to set the limits; remove the limits at the end.

        Raises:
            RuntimeError: this system cannot limit the memory.
        """
        listen = [(host if _is_ip(host) else "127.0.0.1", port) for host, port in self.addresses]
        request = {"listen": listen, "processes": self.settings.processes, "memory": None}
        if self.settings.memory_bytes is None:
            yield request
            return
        with contextlib.closing(MemoryLimit(self.group_name, self.settings.memory_bytes)) as limit:
            yield {**request, "memory": str(limit.path / "cgroup.procs")}

    def command(self, command: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """Return the command that runs `command` in the sandbox.

        Raises:
            ValueError: the program is outside of the sandbox, a path in `read` does not exist, or `cwd` is /.
        """
        if missing := [path for path in self.settings.read if not os.path.exists(path)]:
            raise ValueError(f"read contains paths that do not exist on this machine: {', '.join(missing)}")
        readable = [*filter(os.path.exists, SYSTEM), *self.settings.read]
        cwd = None if self.cwd is None else os.path.abspath(self.cwd)
        if cwd == "/":
            raise ValueError(
                "cwd='/' would let the program read the whole machine. Set cwd to the folder of the program"
            )
        if cwd is not None:
            readable.append(cwd)
        self._check_program(command[0], env, readable)
        argv = [require_bubblewrap(), "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
        argv += ["--unshare-cgroup-try", "--die-with-parent", "--hostname", "sandbox"]
        argv += ["--size", str(_SCRATCH_BYTES), "--tmpfs", "/tmp", "--dev", "/dev", "--proc", "/proc"]
        for name in LINKS:
            place = f"/{name}"
            if os.path.islink(place):
                argv += ["--symlink", os.readlink(place), place]
            elif os.path.isdir(place):
                argv += ["--ro-bind", place, place]
        for path in readable:
            argv += ["--ro-bind", path, path]
        folder = str(self.folder)
        argv += ["--ro-bind", f"{folder}/hosts", "/etc/hosts", "--bind", folder, folder]
        return [*argv, "--remount-ro", "/", "--chdir", cwd or folder, "--", *command]

    def _check_program(self, name: str, env: Mapping[str, str], readable: Sequence[str]) -> None:
        """Refuse a program that exists on this machine and cannot be seen in the sandbox."""
        place = os.path.join(self.cwd or self.folder, name) if os.path.dirname(name) else name
        found = shutil.which(place, path=env.get("PATH", os.defpath))
        if found is None:
            return  # reported by the caller
        inside = [*readable, *(f"/{link}" for link in LINKS), str(self.folder)]
        for path in (os.path.abspath(found), os.path.realpath(found)):
            if not any(path == each or path.startswith(f"{each}/") for each in inside):
                raise ValueError(
                    f"The program {name!r} is {path}, which the sandbox cannot read. Add its folder to read=: "
                    f"sandbox=agl.Bubblewrap(read=[{os.path.dirname(path)!r}])"
                )


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


# --- the network -----------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def forwarding(
    listeners: asyncio.Future[list[socket.socket]], addresses: Sequence[Address]
) -> AsyncGenerator[None]:
    """Forward each connection to a listening socket of the sandbox to the address at the same position."""
    await asyncio.wait({listeners})
    sockets = [] if listeners.cancelled() else listeners.result()  # a program that could not start has none
    servers: list[asyncio.Server] = []
    open_now: set[asyncio.Task[None]] = set()

    def accept(address: Address) -> Any:
        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = cast("asyncio.Task[None]", asyncio.current_task())
            if len(open_now) == MOST_CONNECTIONS:
                writer.transport.abort()
                return
            open_now.add(task)
            try:
                await _forward(reader, writer, address)
            finally:
                open_now.discard(task)

        return forward

    try:
        for listener, address in zip(sockets, addresses, strict=False):
            servers.append(await asyncio.start_server(accept(address), sock=listener))
        yield
    finally:
        for server in servers:
            server.close()
        for task in tuple(open_now):
            task.cancel()
        await asyncio.gather(*open_now, return_exceptions=True)
        for each in sockets:
            each.close()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: Address) -> None:
    try:
        far_reader, far_writer = await asyncio.open_connection(*address)
    except OSError:
        writer.transport.abort()  # the program sees a reset connection
        return
    try:
        await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
    finally:
        writer.transport.abort()
        far_writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()


# --- the limit of memory ---------------------------------------------------------------------------------------------


class MemoryLimit:
    """A control group (cgroups(7), version 1 or 2) with a limit of memory, for the processes of one program.

    Raises:
        RuntimeError: this system has no control group for memory that this process can write to.
    """

    def __init__(self, name: str, memory_bytes: int) -> None:
        parent, file = _memory_group()
        self.path = parent / name
        try:
            self.path.mkdir()
            (self.path / file).write_text(str(memory_bytes))
        except OSError as error:
            with contextlib.suppress(OSError):
                self.path.rmdir()
            raise RuntimeError(
                f"memory_bytes={memory_bytes} requires a control group that the runner can write to, and {parent} is "
                f"not one ({error.strerror}). Omit memory_bytes, or limit the memory of the runner's container"
            ) from error

    def close(self) -> None:
        """Remove the group. Its processes have ended; the kernel may need a moment to notice."""
        until = time.monotonic() + _GIVE_UP_SECONDS
        while time.monotonic() < until:
            with contextlib.suppress(FileNotFoundError):
                try:
                    self.path.rmdir()
                except OSError:
                    time.sleep(0.01)
                    continue
            return


def remove_left_groups(name: str) -> bool:
    """Remove the control groups `name` and `name-*` of programs that have ended with their runner.

    Returns:
        False if one of them still contains processes.
    """
    try:
        parent, _ = _memory_group()
        for path in (parent / name, *parent.glob(f"{name}-*")):
            with contextlib.suppress(FileNotFoundError):
                path.rmdir()
    except (RuntimeError, OSError) as error:
        return getattr(error, "errno", None) != errno.EBUSY
    return True


def _memory_group() -> tuple[Path, str]:
    """Return the folder of this process's control group for memory, and the name of the file with its limit."""
    mounts: dict[str, str] = {}
    with contextlib.suppress(OSError), open("/proc/self/mounts") as file:
        for line in file:
            _, place, kind, options, *_ = line.split()
            if kind == "cgroup2":
                mounts[""] = place
            elif kind == "cgroup" and "memory" in options.split(","):
                mounts["memory"] = place
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file:
            _, names, path = line.rstrip("\n").split(":", 2)
            version = "memory" if "memory" in names.split(",") else names
            if version in mounts and (version or "memory" not in mounts):
                own = Path(mounts[version] + path)
                return (own if own.is_dir() else Path(mounts[version])), (
                    "memory.limit_in_bytes" if version else "memory.max"
                )
    raise RuntimeError("memory_bytes requires Linux control groups (cgroups), which this system does not have")
