"""The folder of a training run: settings, one line of metrics per step, the model, the lock."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Generator, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from agentlightning.errors import BadRequestError
from agentlightning.private_files import open_private, private_folder
from agentlightning.store.rules.values import to_json
from agentlightning.training.progress import StepFigures

logger = logging.getLogger(__name__)

_PACKAGES = ("agl-framework", "torch", "transformers", "peft", "openai", "pydantic", "opentelemetry-sdk")
_FIGURES = frozenset(field.name for field in dataclasses.fields(StepFigures))


def new_run_folder(parent: str | Path = "runs") -> Path:
    """Make a folder named after the time below `parent` and return it; nobody else gets the same one.

    Raises:
        BadRequestError: it cannot be made or written.
    """
    name = time.strftime("%Y%m%d-%H%M%S")
    check_writable(parent)
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        folder = Path(parent) / (name + suffix)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
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
    """Lock the folder during the body, so that no other process trains in it. The system releases the lock when this
    process ends, however it ends; children do not inherit it.

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
        """The folder of the trained model."""
        return self.path / "model"

    def check_unused(self) -> None:
        """Make sure that no other run was written here, so that no figures are mixed or lost.

        Raises:
            BadRequestError: the folder has a `metrics.jsonl`.
        """
        if (self.path / "metrics.jsonl").exists():
            raise BadRequestError(f"The output folder {str(self.path)!r} holds a run already; choose another one")

    def write_config(self, **sections: Mapping[str, object]) -> None:
        """Write `config.json`: the settings by section, and the versions of what ran. Other sections stay."""
        path = self.path / "config.json"
        present: dict[str, object] = json.loads(path.read_text()) if path.exists() else {}
        _replace(path, json.dumps({**present, **sections, "versions": versions()}, indent=2, default=str) + "\n")

    def append_metrics(self, figures: Mapping[str, object]) -> None:
        """Append one line to `metrics.jsonl`, on disk when the call returns; numbers that are not finite become null.

        A line that the disk does not take stays in memory, with one warning, and is written before the next one.
        """
        self._unwritten.append(json.dumps(to_json(figures, "figures")).encode() + b"\n")
        try:
            self._write_lines()
        except OSError as error:
            if self._cause is None:
                self._cause = error
                logger.warning("Cannot be written: %s. Figures of steps stay in memory until they can", error)

    def finish(self) -> None:
        """Write the lines that are still in memory.

        Raises:
            OSError: the first reason why they could not be written, and still cannot.
        """
        if self._unwritten:
            try:
                self._write_lines()
            except OSError as error:
                raise self._cause or error from None

    def _write_lines(self) -> None:
        """Append the unwritten lines, whole or not at all."""
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


def read_lines(path: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of `metrics.jsonl` by step; none without the file. A line that was cut when its process was
    killed is skipped."""
    lines: dict[int, dict[str, Any]] = {}
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            figures = json.loads(line)
            lines[int(figures["step"])] = figures
    return lines


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Replace `metrics.jsonl` by these lines, whole or not at all."""
    _replace(path, "".join(json.dumps(line) + "\n" for line in lines))


def figures_of(line: Mapping[str, Any]) -> StepFigures:
    """Return the figures that a line of `metrics.jsonl` was written from."""
    return StepFigures(**{name: value for name, value in line.items() if name in _FIGURES})


def _replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    with open_private(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter."""
    known = {"python": platform.python_version(), "platform": sys.platform}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            known[package] = version(package)
    return known
