"""The checkpoints of a run on disk: written atomically, checked before use, limited in number.

A checkpoint is a folder `checkpoint-STEP`. Its files are written under another name, flushed to the disk and listed
with their SHA-256 in `manifest.json`; then the folder is renamed. An interruption at any time leaves the earlier
checkpoints unchanged.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentlightning.base.private_files import private_folder
from agentlightning.errors import BadRequestError

if TYPE_CHECKING:
    from agentlightning.training.records import RunLog
    from agentlightning.training.updater import Updater

logger = logging.getLogger(__name__)

CHECKPOINTS: Final = "checkpoints"
"""Name of the folder with a run's checkpoints."""
MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
"""Version of the checkpoint format; later releases have greater numbers."""
_NAME: Final = re.compile(r"checkpoint-(\d+)")
_UNFINISHED: Final = ".unfinished-"
_REPLACED: Final = ".replaced-"


class BrokenCheckpointError(BadRequestError):
    """A checkpoint differs from what was written. The message names the file and the difference."""


@dataclass(frozen=True)
class Checkpoint:
    """One intact checkpoint."""

    path: Path
    step: int
    """Number of completed steps of the run."""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """JSON data of its writer."""

    def record(self) -> dict[str, Any]:
        """Return the data of its record in the run's store."""
        facts = {name: self.facts[name] for name in ("digest", "weight_version")}
        return {"path": str(self.path.resolve()), **facts}


class CheckpointFolder:
    """The folder that holds a run's checkpoints. One process writes to it at a time."""

    def __init__(self, path: str | Path, *, limit: int | None = None) -> None:
        """Use a folder. `limit` is the number of newest checkpoints to keep; None keeps all."""
        self.path = Path(path)
        self._limit = limit

    def write(self, step: int, fill: Callable[[Path], None], facts: Mapping[str, object]) -> Checkpoint:
        """Write a checkpoint, whose files `fill` writes into a folder. It replaces a checkpoint of the same step.

        Raises:
            OSError: it cannot be written, such as on a full disk; no part of it remains, and the others do not change.
        """
        private_folder(self.path)
        self.tidy()
        unfinished, place = self.path / f"{_UNFINISHED}{step}", self.path / f"checkpoint-{step}"
        unfinished.mkdir(mode=0o700)
        try:
            fill(unfinished)
            paths = sorted(path for path in unfinished.rglob("*") if path.is_file())
            files = {path.relative_to(unfinished).as_posix(): _flush(path) for path in paths}
            manifest = {"format": FORMAT, "step": step, "facts": dict(facts), "files": files}
            (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1))
            _flush(unfinished / MANIFEST)
            for folder in {path.parent for path in paths} | {unfinished}:
                _flush_folder(folder)
            if place.exists():
                os.rename(place, self.path / f"{_REPLACED}{step}")
            os.rename(unfinished, place)
        except BaseException:  # remove the unfinished checkpoint in any case
            self.tidy()
            raise
        _flush_folder(self.path)
        self.tidy()
        # later ones do not count: a run that resumed from an earlier checkpoint found them broken
        steps = [each for each in self.steps() if each <= step]
        for old in steps[: -self._limit] if self._limit else ():
            shutil.rmtree(self.path / f"checkpoint-{old}", ignore_errors=True)
        return Checkpoint(place, step, dict(facts))

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints, intact or not, the oldest first."""
        paths = self.path.iterdir() if self.path.is_dir() else ()
        return sorted(int(match[1]) for path in paths if (match := _NAME.fullmatch(path.name)))

    def last_good(self, *, before: int | None = None) -> Checkpoint | None:
        """Return the newest intact checkpoint of a step below `before`, or None. Log each broken one. Change nothing,
        because another process may be writing a checkpoint."""
        for step in reversed(self.steps()):
            if before is not None and step >= before:
                continue
            try:
                return read_checkpoint(self.path / f"checkpoint-{step}")
            except BrokenCheckpointError as error:
                logger.warning("%s; using the checkpoint before it", error)
        return None

    def tidy(self) -> None:
        """Remove the remains of an interrupted `write` and restore the checkpoint that it was about to replace. Only
        the process that writes here may call it."""
        for path in self.path.glob(f"{_REPLACED}*"):
            place = self.path / f"checkpoint-{path.name.removeprefix(_REPLACED)}"
            if not place.exists():
                os.rename(path, place)
        for path in [*self.path.glob(f"{_UNFINISHED}*"), *self.path.glob(f"{_REPLACED}*")]:
            shutil.rmtree(path, ignore_errors=True)


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Check the files of a checkpoint and return it.

    Raises:
        BadRequestError: the folder has no checkpoint, or a later release wrote it.
        BrokenCheckpointError: a file is missing, truncated or changed. The message names it.
    """
    path = Path(path)
    if not path.is_dir():
        raise BadRequestError(f"Checkpoint {str(path)!r} does not exist or is not a folder")
    broken = f"The checkpoint {str(path)!r} is broken"
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        version, step = int(manifest["format"]), int(manifest["step"])
        files, facts = dict(manifest["files"]), dict(manifest["facts"])
    except FileNotFoundError:
        raise BrokenCheckpointError(f"{broken}: {MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenCheckpointError(f"{broken}: {MANIFEST}: {error}") from None
    if version > FORMAT:
        raise BadRequestError(
            f"The checkpoint {str(path)!r} has format {version}, but this release reads format {FORMAT}. Use the "
            "release that wrote it, or a later one"
        )
    for name, written in files.items():
        file = path / name
        if not file.is_file():
            raise BrokenCheckpointError(f"{broken}: {name} is missing")
        if (size := file.stat().st_size) != written["bytes"]:
            raise BrokenCheckpointError(f"{broken}: {name} has {size} bytes instead of {written['bytes']}")
        if sha256_of(file) != written["sha256"]:
            raise BrokenCheckpointError(f"{broken}: the content of {name} has changed")
    return Checkpoint(path, step, facts)


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _flush(file: Path) -> dict[str, object]:
    """Flush a file to the disk, make it private, and return its size and SHA-256."""
    with file.open("rb+") as opened:
        os.fchmod(opened.fileno(), 0o600)
        os.fsync(opened.fileno())
    return {"bytes": file.stat().st_size, "sha256": sha256_of(file)}


def _flush_folder(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


@dataclass(frozen=True)
class CompletedStep:
    """A run after a completed step."""

    step: int
    weight_version: int
    digest: str
    state: Callable[[], dict[str, Any]]
    """Returns the state that the loop needs to resume after this step, as JSON data."""


@dataclass(kw_only=True)
class CheckpointWriter:
    """Writes the checkpoints of a run: every few steps, and always at its end. Belongs to the loop; a thread writes."""

    folder: CheckpointFolder
    updater: Updater
    log: RunLog
    run_facts: Mapping[str, Any]
    """Facts of the run that are part of every checkpoint."""
    saved: int = 0
    """Step of the newest checkpoint."""
    _writing: threading.Lock = field(default_factory=threading.Lock)
    _unrecorded: Checkpoint | None = None
    """A checkpoint that is written but not yet recorded in the run."""

    async def step_done(self, completed: CompletedStep, alarm: Callable[[str], None]) -> None:
        """Write a checkpoint if it is due. If that fails, call `alarm`, and the run continues."""
        if not self.updater.saves_every or completed.step % self.updater.saves_every:
            return
        try:
            await asyncio.to_thread(self._write, completed)
        except OSError as error:
            last = f"the last good one is of step {self.saved}" if self.saved else "no earlier one exists"
            alarm(f"step {completed.step}: the checkpoint could not be written to {self.folder.path} ({error}); {last}")
            return
        await self._record()

    async def end(self, completed: CompletedStep | None) -> None:
        """Write the checkpoint of the last completed step, if the weights have not changed since. Also record a
        checkpoint that was written but not recorded because of an interruption.

        Raises:
            OSError: it cannot be written; the last good checkpoint does not change.
        """
        if completed is not None:
            self._write(completed)  # not on another thread: the end of the run may cancel a pending wait
        await self._record()

    async def _record(self) -> None:
        written, self._unrecorded = self._unrecorded, None
        if written is not None:
            await self.log.checkpoint(written.step, **written.record())

    def _write(self, completed: CompletedStep) -> None:
        step = completed.step
        with self._writing, self.updater.locked():
            if step <= self.saved:
                return
            if not self.updater.can_save(step, completed.weight_version):
                if self.updater.weight_version != completed.weight_version:
                    logger.warning("step %d is not saved: a later update has begun; last saved: %d", step, self.saved)
                return
            facts = {**self.run_facts, "digest": completed.digest, "weight_version": completed.weight_version}
            facts |= {**self.updater.checkpoint_facts(), "state": completed.state()}
            self._unrecorded = self.folder.write(step, lambda folder: self.updater.save_checkpoint(folder, step), facts)
            self.saved = step
