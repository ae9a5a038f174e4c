"""The folder of a training run: settings, one line of metrics per step, model and lock. Also exports runs as files."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from agentlightning.base.private_files import open_private, private_folder
from agentlightning.base.terminal import json_text
from agentlightning.errors import BadRequestError
from agentlightning.store.base import LightningStore
from agentlightning.store.cursors import pages_of
from agentlightning.store.rules.values import to_json
from agentlightning.training.progress import StepFigures
from agentlightning.training.records import clean_record, clean_run
from agentlightning.types.runs import Run

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
_PACKAGES = ("agl-framework", "torch", "transformers", "peft", "openai", "pydantic", "opentelemetry-sdk")
_FIGURES = frozenset(field.name for field in dataclasses.fields(StepFigures))
_PAGE = 100
_FILE_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")


# --- the folder ------------------------------------------------------------------------------------------------------


def new_run_folder(parent: str | Path = "runs") -> Path:
    """Create a unique folder below `parent`, named after the current time, and return it.

    Raises:
        BadRequestError: it cannot be created or written.
    """
    name = time.strftime("%Y%m%d-%H%M%S")
    check_writable(parent)
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        folder = Path(parent) / (name + suffix)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            return folder
    raise BadRequestError(f"{parent} already has 100 runs that began in this second. Choose another folder")


def check_writable(folder: str | Path) -> Path:
    """Create the folder if needed and return it.

    Raises:
        BadRequestError: it is a file, or cannot be written. The message gives the reason.
    """
    path = Path(folder)
    try:
        private_folder(path)
        probe = path / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise BadRequestError(
            f"The output folder {str(path)!r} cannot be written: {error.strerror or error}. Choose another folder, or "
            "make it writable."
        ) from error
    return path


@contextlib.contextmanager
def held_folder(folder: str | Path) -> Generator[None]:
    """Lock the folder during the body, so that no other process trains in it. The system releases the lock whenever
    this process ends; children do not inherit it.

    Raises:
        BadRequestError: another process trains in it.
    """
    path = check_writable(folder)
    with open_private(path / ".lock", "a") as file:
        try:
            import fcntl

            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # no such locks on this system: two processes in one folder are not detected
            pass
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):  # else a file system without locks
                raise BadRequestError(
                    f"Another process is training in the output folder {str(path)!r}. Wait until that run has ended, "
                    "or stop it"
                ) from None
        yield


class RunFolder:
    """Writes the files of a run. Belongs to the loop of the run; used by one thread at a time."""

    def __init__(self, path: str | Path) -> None:
        self.path = check_writable(path)
        self._unwritten: list[bytes] = []
        """Lines of `metrics.jsonl` that could not be written."""
        self._cause: OSError | None = None
        """The error of the first unwritten line."""

    @property
    def model(self) -> Path:
        """The folder of the trained model."""
        return self.path / "model"

    def check_unused(self) -> None:
        """Check that the folder has no other run, so that no metrics are mixed or lost.

        Raises:
            BadRequestError: the folder has a `metrics.jsonl`.
        """
        if (self.path / METRICS).exists():
            raise BadRequestError(f"The output folder {str(self.path)!r} already has a run. Choose another folder")

    def write_config(self, **sections: Mapping[str, object]) -> None:
        """Write `config.json`: the settings by section, and the versions of packages. Other sections do not change."""
        path = self.path / "config.json"
        present: dict[str, object] = json.loads(path.read_text()) if path.exists() else {}
        config = {**present, **sections, "versions": versions()}
        replace_file(path, json.dumps(config, indent=2, default=str) + "\n")

    def append_metrics(self, figures: Mapping[str, object]) -> None:
        """Append one line to `metrics.jsonl`, on disk when the call returns; non-finite numbers become null.

        A line that cannot be written stays in memory, with one warning, and is written before the next one.
        """
        self._unwritten.append(json.dumps(to_json(figures, "figures")).encode() + b"\n")
        try:
            self._write_lines()
        except OSError as error:
            if self._cause is None:
                self._cause = error
                logger.warning("Cannot write metrics: %s. They stay in memory until they can be written", error)

    def finish(self) -> None:
        """Write the lines that are still in memory.

        Raises:
            OSError: they still cannot be written; the first error is raised.
        """
        if self._unwritten:
            try:
                self._write_lines()
            except OSError as error:
                raise self._cause or error from None

    def _write_lines(self) -> None:
        """Append the unwritten lines, all or none."""
        remaining = b"".join(self._unwritten)
        path = self.path / METRICS
        with open_private(path, "a") as file:
            size = os.fstat(file.fileno()).st_size
            try:
                while remaining:
                    remaining = remaining[os.write(file.fileno(), remaining) :]
                os.fsync(file.fileno())
            except OSError as error:
                error.filename = str(path)
                os.ftruncate(file.fileno(), size)
                raise
        self._unwritten, self._cause = [], None


def read_lines(path: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of `metrics.jsonl` by step; empty without the file. A truncated line of a killed process is
    skipped."""
    lines: dict[int, dict[str, Any]] = {}
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            figures = json.loads(line)
            lines[int(figures["step"])] = figures
    return lines


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Replace `metrics.jsonl` atomically by these lines."""
    replace_file(path, "".join(json.dumps(line) + "\n" for line in lines))


def figures_of(line: Mapping[str, Any]) -> StepFigures:
    """Return the metrics of a line of `metrics.jsonl`."""
    return StepFigures(**{name: value for name, value in line.items() if name in _FIGURES})


def replace_file(path: Path, text: str) -> None:
    """Write a file atomically, on disk when the call returns."""
    temporary = path.with_suffix(".tmp")
    with open_private(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the relevant packages."""
    versions_by_name = {"python": platform.python_version(), "platform": sys.platform}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions_by_name[package] = version(package)
    return versions_by_name


# --- a run as files --------------------------------------------------------------------------------------------------


async def export_run(store: LightningStore, run: Run, folder: Path) -> dict[str, int]:
    """Write a run into an empty or new folder, and return the number of lines of each file.

    `run.json` holds the run with its settings and versions, `<kind>.jsonl` its records in the order of their steps, and
    `vocabulary-<id>.json` the text of each token id. Secrets are hidden.

    Raises:
        BadRequestError: the folder cannot be written, or is not empty.
    """
    if os.listdir(check_writable(folder)):
        raise BadRequestError(f"The folder {str(folder)!r} is not empty. Choose another folder")

    def write(name: str, data: object) -> None:
        with open_private(folder / name, "w") as file:
            file.write(json_text(json.dumps(data, indent=2, ensure_ascii=False)) + "\n")

    write("run.json", clean_run(run).model_dump(mode="json"))
    lines, vocabularies = Counter[str](), set[str]()
    with contextlib.ExitStack() as stack:
        files: dict[str, IO[str]] = {}
        async for page in pages_of(store.query_run_records, run_id=run.run_id, limit=_PAGE):
            for record in page:
                if record.kind not in files:
                    files[record.kind] = stack.enter_context(open_private(folder / f"{record.kind}.jsonl", "w"))
                line = json.dumps(clean_record(record).model_dump(mode="json"), ensure_ascii=False)
                files[record.kind].write(json_text(line) + "\n")
                lines[record.kind] += 1
                vocabularies |= {row["vocabulary"] for row in record.data.get("rows", ()) if row.get("vocabulary")}
    for name in sorted(vocabularies):
        tokens = await store.get_vocabulary(name) if _FILE_NAME.fullmatch(name) else None
        if tokens is not None:
            write(f"vocabulary-{name}.json", tokens)
    return dict(lines)
