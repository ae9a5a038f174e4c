"""A Harbor environment of bubblewrap: a private folder as the root of each command, without an image or a daemon.

Only `HarborAgent(environment="bwrap")` names this module, to Harbor, because it needs Harbor.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import shlex
import shutil
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult, SandboxBuildFailedError
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from typing_extensions import override

from agentlightning.environments.harbor.dockerfile import DockerfileError, Step, read_dockerfile
from agentlightning.litagent.command.process import Program, ProgramLimits
from agentlightning.litagent.command.sandbox import (
    LINKS,
    NOBODY,
    SYSTEM,
    Bubblewrap,
    Sandbox,
    addresses_of,
    require_bubblewrap,
)

logger = logging.getLogger(__name__)

WORKDIR = "/app"
"""Working folder of a task that sets none."""
OUTPUT_BYTES = 4 << 20
"""Bytes that are kept of each output stream of a command."""
_OWN = ("/etc/group", "/etc/nsswitch.conf", "/etc/passwd")
"""Files of the system that the root has itself, so that a task can change them."""
_FILES = {
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
}
_FOLDERS = ("app", "etc", "home", "logs/agent", "logs/artifacts", "logs/verifier", "mnt", "opt", "root", "run", "srv")
_TRANSFER = "/run/transfer"


@dataclass(frozen=True, slots=True)
class _Root(Sandbox):
    """The sandbox of one command: `folder` is the root, in which the command is the user root."""

    name: str = ""
    tools: Sequence[str] = ()
    transfer: Path | None = None
    """A folder that only this command can see, at /run/transfer."""

    @property
    @override
    def group_name(self) -> str:
        return self.name

    @override
    def command(self, command: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """Return the command that runs `command` in the sandbox.

        Raises:
            ValueError: a folder of `read` or `tools` does not exist.
        """
        if missing := [path for path in (*self.settings.read, *self.tools) if not os.path.exists(path)]:
            raise ValueError(f"These paths do not exist on this machine: {', '.join(missing)}")
        argv = [require_bubblewrap(), "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
        argv += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--hostname", "sandbox"]
        argv += ["--uid", "0", "--gid", "0", "--bind", str(self.folder), "/", "--dev", "/dev", "--proc", "/proc"]
        for path in (*filter(os.path.exists, SYSTEM), *self.settings.read, *self.tools):
            if path not in _OWN:
                argv += ["--ro-bind", path, path]
        if self.transfer is not None:
            argv += ["--bind", str(self.transfer), _TRANSFER]
        return [*argv, "--chdir", self.cwd or "/", "--", *command]


class BubblewrapEnvironment(BaseEnvironment):
    """A sandbox of bubblewrap for a Harbor trial.

    The system of the host (/usr) and `tools` are read-only; every other file is in a folder of the trial. Only `urls`
    can be reached, and only in the sandbox of the agent. A command and its processes end together.

    A Dockerfile of the task is followed as far as no image is needed: WORKDIR, ENV, ARG, COPY and ADD of local files,
    and RUN without a network. FROM is ignored.

    Raises:
        ValueError: the task needs another user than root.
        RuntimeError: bubblewrap does not work here.
    """

    def __init__(
        self,
        *args: Any,
        folder: str,
        urls: Sequence[str] = (),
        read: Sequence[str] = (),
        tools: Sequence[str] = (),
        memory_bytes: int | None = None,
        processes: int | None = 512,
        **kwargs: Any,
    ) -> None:
        self._ids = (NOBODY, NOBODY) if os.geteuid() == 0 else None
        self._settings = Bubblewrap(read, memory_bytes, processes)
        self._tools = tuple(tools)
        self._parent = Path(folder)
        self._place: Path | None = None
        self._numbers = itertools.count()
        self._workdir = WORKDIR
        self._image_env: dict[str, str] = {}
        super().__init__(*args, **kwargs)
        is_agent = self.session_id.endswith("__env") and "__verifier" not in self.session_id  # a long id is cut
        self._addresses = addresses_of(urls) if is_agent else []

    @staticmethod
    @override
    def type() -> str:
        return "bwrap"

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(
            disable_internet=True,
            network_allowlist=True,
            network_allowlist_hostnames=True,
            network_allowlist_ipv4_addresses=True,
        )

    @classmethod
    @override
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(memory_limit=True)

    @override
    def _validate_definition(self) -> None:
        require_bubblewrap()

    # --- beginning and end -------------------------------------------------------------------------------------------

    @override
    async def start(self, force_build: bool) -> None:
        self._place = await asyncio.to_thread(self._make_root)
        dockerfile = self.environment_dir / "Dockerfile"
        if dockerfile.is_file():
            await self._build(dockerfile)
        elif self.task_env_config.workdir:
            self._workdir = self.task_env_config.workdir
        await self._checked(f"mkdir -p {shlex.quote(self._workdir)}", cwd="/")
        if not dockerfile.is_file() and self.environment_dir.is_dir() and any(self.environment_dir.iterdir()):
            await self.upload_dir(self.environment_dir, self._workdir)
        if self.task_env_config.workdir:
            self._workdir = self.task_env_config.workdir

    @override
    async def stop(self, delete: bool) -> None:
        place, self._place = self._place, None
        if place is not None:
            await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)

    def _make_root(self) -> Path:
        place = Path(tempfile.mkdtemp(prefix="sandbox-", dir=self._parent))
        place.chmod(0o711)
        root = place / "root"
        for name in _FOLDERS:
            (root / name).mkdir(parents=True)
        for name in LINKS:
            if os.path.islink(f"/{name}"):
                (root / name).symlink_to(os.readlink(f"/{name}"))
        for name, text in {**_FILES, "etc/hosts": Sandbox.hosts_of(self._addresses).decode()}.items():
            (root / name).write_text(text)
        (root / "tmp").mkdir()
        (root / "tmp").chmod(0o1777)
        if self._ids is not None:
            for path in (root, *root.rglob("*")):
                os.chown(path, *self._ids, follow_symlinks=False)
        return place

    # --- the Dockerfile of a task ------------------------------------------------------------------------------------

    async def _build(self, dockerfile: Path) -> None:
        """Follow a Dockerfile.

        Raises:
            SandboxBuildFailedError: it needs an image, a network, or an instruction that is not supported.
        """
        self._workdir = "/"
        try:
            for step in read_dockerfile(dockerfile, {"PATH": self._variables(None)["PATH"]}):
                try:
                    await self._follow(step)
                except RuntimeError as error:
                    raise step.error(error) from error
        except DockerfileError as error:
            raise SandboxBuildFailedError(
                f"environment='bwrap' cannot follow {error}. Use environment='docker' or 'podman', or change "
                f"{dockerfile}"
            ) from error

    async def _follow(self, step: Step) -> None:
        if step.workdir != self._workdir:
            await self._checked(f"mkdir -p -- {shlex.quote(step.workdir)}", cwd="/")
        self._workdir, self._image_env = step.workdir, {**step.args, **step.env}
        for source, target in step.copies:
            await (self.upload_dir if source.is_dir() else self.upload_file)(source, target)
        if step.command:
            result = await self._run(step.command)
            if result.return_code != 0:
                said = (result.stderr or result.stdout or "").strip()[-300:]
                raise RuntimeError(
                    f"the command ended with {result.return_code} in a sandbox without a network: {said}"
                )
        self._image_env = dict(step.env)

    # --- commands ----------------------------------------------------------------------------------------------------

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command with bash.

        Raises:
            TimeoutError: it exceeded `timeout_sec` and was ended.
            ValueError: `user` is not root.
        """
        return await self._run(["/usr/bin/bash", "-c", command], cwd, env, timeout_sec, user)

    async def _run(
        self,
        command: Sequence[str],
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout: float | None = None,
        user: str | int | None = None,
        transfer: Path | None = None,
    ) -> ExecResult:
        asked = self.default_user if user is None else user
        if asked not in (None, "root", 0, "0"):
            raise ValueError(f"The task wants the user {asked!r}; a bubblewrap sandbox has only root. Use containers")
        if self._place is None:
            raise RuntimeError("The sandbox is not running")
        root, number = self._place / "root", next(self._numbers)
        name = f"{self._parent.name}-{self._place.name}-{number}"
        cwd = str(PurePosixPath(self._workdir) / (cwd or ""))
        sandbox = _Root(self._settings, root, cwd, self._addresses, name, self._tools, transfer)
        limits = ProgramLimits(timeout or None, 0.0, OUTPUT_BYTES)
        program = Program(command, self._variables(env), None, limits, (), self._ids, sandbox)
        output = await program.run(None)
        return ExecResult(stdout=output.stdout, stderr=output.stderr, return_code=output.exit_code)

    def _variables(self, env: dict[str, str] | None) -> dict[str, str]:
        path = [*_programs_in(self._tools), "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin"]
        own = {"PATH": ":".join(path), "HOME": "/root", "LANG": "C.UTF-8", "USER": "root"}
        return {**own, **self._image_env, **(self._merge_env(env) or {})}

    async def _checked(self, command: str, *, cwd: str, transfer: Path | None = None) -> None:
        result = await self._run(["/usr/bin/bash", "-c", command], cwd, transfer=transfer)
        if result.return_code != 0:
            raise RuntimeError(f"{command!r} ended with {result.return_code}: {(result.stderr or '').strip()[-500:]}")

    # --- files -------------------------------------------------------------------------------------------------------
    # A command in the sandbox packs and unpacks, so that a link that the agent made cannot lead out of the sandbox.

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        with self._transfer() as folder:
            name = Path(source_path).name  # kept if the target is a folder
            await asyncio.to_thread(shutil.copy, source_path, folder / name)
            await asyncio.to_thread(self._give, folder)
            place = shlex.quote(str(target_path))
            copied = shlex.quote(f"{_TRANSFER}/{name}")
            command = f'mkdir -p -- "$(dirname -- {place})" && cp -- {copied} {place}'
            await self._checked(command, cwd="/", transfer=folder)

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        with self._transfer() as folder:
            await asyncio.to_thread(_pack, Path(source_dir), folder / "files.tar")
            await asyncio.to_thread(self._give, folder)
            place = shlex.quote(str(target_dir))
            command = f"mkdir -p -- {place} && tar -C {place} --no-same-owner -xf {_TRANSFER}/files.tar"
            await self._checked(command, cwd="/", transfer=folder)

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        with self._transfer() as folder:
            await asyncio.to_thread(self._give, folder)
            command = f"cat -- {shlex.quote(str(source_path))} > {_TRANSFER}/file"
            await self._checked(command, cwd="/", transfer=folder)
            await asyncio.to_thread(_receive, folder / "file", Path(target_path))

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        with self._transfer() as folder:
            await asyncio.to_thread(self._give, folder)
            place = shlex.quote(str(source_dir))
            command = f"tar -C {place} -cf {_TRANSFER}/files.tar ."
            await self._checked(command, cwd="/", transfer=folder)
            packed = folder / "received.tar"
            await asyncio.to_thread(_receive, folder / "files.tar", packed)
            await asyncio.to_thread(_unpack, packed, Path(target_dir))

    def _transfer(self) -> _TransferFolder:
        assert self._place is not None
        return _TransferFolder(prefix="transfer-", dir=self._place)

    def _give(self, folder: Path) -> None:
        if self._ids is not None:
            for path in (folder, *folder.iterdir()):
                os.chown(path, *self._ids)


class _TransferFolder(tempfile.TemporaryDirectory[str]):
    @override
    def __enter__(self) -> Any:  # a Path
        return Path(super().__enter__())


def _programs_in(tools: Sequence[str]) -> list[str]:
    """Return the folders for PATH of read-only folders with programs: of a Python environment, of npm, or itself."""
    found: list[str] = []
    for tool in tools:
        inner = [f"{tool}/{name}" for name in ("bin", "node_modules/.bin") if os.path.isdir(f"{tool}/{name}")]
        found += inner or [tool]
    return found


def _pack(source: Path, target: Path) -> None:
    with tarfile.open(target, "w") as tar:
        tar.add(source, arcname=".")


def _receive(source: Path, target: Path) -> None:
    """Copy a file that a command in the sandbox wrote, which must be a regular one."""
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file, open(target, "wb") as copy:
        shutil.copyfileobj(file, copy)


def _unpack(packed: Path, target: Path) -> None:
    """Unpack files that a sandbox packed, without devices and links that lead out of the target."""
    target.mkdir(parents=True, exist_ok=True)

    def checked(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        if member.isdev():
            return None
        try:
            return tarfile.data_filter(member, path)
        except tarfile.FilterError as error:
            logger.info("a file of a sandbox was not copied: %s", error)
            return None

    with tarfile.open(packed) as tar:
        tar.extractall(target, filter=checked)
