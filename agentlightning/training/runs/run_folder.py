"""The folder of a training run: settings, one line of metrics per step, the model, the log."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import platform
import sys
import time
from collections.abc import Generator, Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from agentlightning.errors import BadRequestError
from agentlightning.private_files import open_private, private_folder

logger = logging.getLogger(__name__)
_PACKAGES = ("agl-framework", "torch", "transformers", "peft", "openai", "pydantic", "opentelemetry-sdk")


def new_run_folder(parent: str | Path = "runs") -> Path:
    """Make a folder named after the time below `parent` and return it; nobody else gets the same one.

    Raises:
        BadRequestError: it cannot be made or written.
    """
    name = time.strftime("%Y%m%d-%H%M%S")
    check_writable(parent)
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        folder = Path(parent) / (name + suffix)
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return folder
    raise BadRequestError(f"{parent} holds a hundred runs of this second; choose another folder")


def check_writable(folder: str | Path) -> Path:
    """Make the folder if needed and return it.

    Raises:
        BadRequestError: it is a file, or cannot be written; says why.
    """
    path = Path(folder)
    try:
        private_folder(path)
        probe = path / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise BadRequestError(
            f"The output folder {str(path)!r} cannot be written: {error.strerror or error}. "
            "Choose another one, or make it writable."
        ) from error
    return path


@contextlib.contextmanager
def held_folder(folder: str | Path) -> Generator[None]:
    """Keep other processes from training in this folder during the body. The system lets it go when this process ends,
    however it ends; children do not inherit it.

    Raises:
        BadRequestError: another process trains in it.
    """
    path = check_writable(folder)
    with open_private(path / ".lock", "a") as file:
        if not _locked(file.fileno()):
            raise BadRequestError(
                f"Another process trains in the output folder {str(path)!r}: wait until that run has ended, or stop it"
            )
        yield


def _locked(file: int) -> bool:
    try:
        import fcntl
    except ImportError:  # no such locks on this system: two processes in one folder are not noticed
        return True
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)  # else a file system without locks
    return True


class RunFolder:
    """Writes the files of a run. Belongs to the loop of the run; used by one thread at a time."""

    def __init__(self, path: str | Path) -> None:
        self.path = check_writable(path)
        self._unwritten: list[bytes] = []
        """Lines of `metrics.jsonl` that the disk did not take."""
        self._cause: OSError | None = None
        """Why the first of them was not taken."""

    @property
    def model(self) -> Path:
        """Where the trained model is kept."""
        return self.path / "model"

    def check_unused(self) -> None:
        """Make sure that no other run was written here, so that no figures are mixed or lost.

        Raises:
            BadRequestError: the folder has a `metrics.jsonl`.
        """
        if (self.path / "metrics.jsonl").exists():
            raise BadRequestError(f"The output folder {str(self.path)!r} holds a run already; choose another one")

    def write_config(self, **sections: Mapping[str, object]) -> None:
        """Write `config.json`: the settings, by who takes them, and the versions of what ran. Sections that are there
        already stay."""
        path = self.path / "config.json"
        present: dict[str, object] = json.loads(path.read_text()) if path.exists() else {}
        temporary = path.with_suffix(".tmp")
        with open_private(temporary, "w") as file:
            file.write(json.dumps({**present, **sections, "versions": versions()}, indent=2, default=str) + "\n")
        temporary.replace(path)

    def append_metrics(self, figures: Mapping[str, object]) -> None:
        """Append one line to `metrics.jsonl`, on disk when the call returns; numbers that are not finite become null.

        A line that the disk does not take, which is said once, stays in memory and is written before the next one.
        """
        self._unwritten.append(json.dumps(_finite(figures)).encode() + b"\n")
        try:
            self._write_lines()
        except OSError as error:
            if self._cause is None:
                self._cause = error
                logger.warning("Cannot be written: %s. Figures of steps stay in memory until they can", error)

    def finish(self) -> None:
        """Write the lines that are still in memory.

        Raises:
            OSError: why the first of them could not be written, and cannot still.
        """
        if self._unwritten:
            try:
                self._write_lines()
            except OSError as error:
                raise self._cause or error from None

    def _write_lines(self) -> None:
        """Append what is unwritten, whole or not at all."""
        left = b"".join(self._unwritten)
        path = self.path / "metrics.jsonl"
        with open_private(path, "a") as file:
            size = os.fstat(file.fileno()).st_size
            try:
                while left:
                    left = left[os.write(file.fileno(), left) :]
                os.fsync(file.fileno())
            except OSError as error:
                error.filename = str(path)
                os.ftruncate(file.fileno(), size)
                raise
        self._unwritten, self._cause = [], None


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter."""
    return dict(_versions())


@lru_cache(maxsize=1)
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": sys.platform}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType] -- JSON data
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType] -- JSON data
    return value
