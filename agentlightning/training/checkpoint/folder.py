"""The checkpoints of a run on disk: written whole or not at all, checked before they are used, bounded in number.

A checkpoint is a folder `checkpoint-STEP`. It is filled under another name, every file is flushed to the disk and its
SHA-256 put down in `manifest.json`, and then the folder is renamed: whatever interrupts that, the checkpoints that were
there before stay as they were. Nothing of torch is needed here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from agentlightning.errors import BadRequestError
from agentlightning.private_files import private_folder

logger = logging.getLogger(__name__)

MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
"""Of the files of a checkpoint; a greater one is of a later release."""
_NAME: Final = re.compile(r"checkpoint-(\d+)")
_UNFINISHED: Final = ".unfinished-"
_REPLACED: Final = ".replaced-"


class BrokenCheckpointError(BadRequestError):
    """A checkpoint that is not what was written: says which file, and what is wrong with it."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint whose files are as they were written."""

    path: Path
    step: int
    """Steps that the run had taken."""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What its writer said of it."""


class CheckpointFolder:
    """The folder that holds a run's checkpoints. One process writes to it at a time."""

    def __init__(self, path: str | Path, *, limit: int | None = None) -> None:
        """`limit`: so many are kept, the newest ones; None keeps all."""
        self.path = Path(path)
        self._limit = limit

    def write(self, step: int, fill: Callable[[Path], None], facts: Mapping[str, object]) -> Checkpoint:
        """Let `fill` write the files of a checkpoint into the folder that it is given, and make it the newest one.

        One of the same step is replaced.

        Raises:
            OSError: it cannot be written, as on a full disk; nothing of it is left, and the others are untouched.
        """
        private_folder(self.path)
        unfinished = self.path / f"{_UNFINISHED}{step}"
        self.tidy()
        unfinished.mkdir(mode=0o700)
        place = self.path / f"checkpoint-{step}"
        try:
            fill(unfinished)
            files = {path.relative_to(unfinished).as_posix(): _flushed(path) for path in _files(unfinished)}
            manifest = {"format": FORMAT, "step": step, "facts": dict(facts), "files": files}
            (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1))
            _flushed(unfinished / MANIFEST)
            for folder in {path.parent for path in _files(unfinished)}:
                _flush_folder(folder)
            if place.exists():
                os.rename(place, self.path / f"{_REPLACED}{step}")
            os.rename(unfinished, place)
        except BaseException:  # whatever ended it, nothing unfinished is left
            self.tidy()
            raise
        _flush_folder(self.path)
        self.tidy()
        self._remove_old(step)
        return Checkpoint(place, step, dict(facts))

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints that are there, whole or not, the oldest first."""
        if not self.path.is_dir():
            return []
        return sorted(int(found[1]) for path in self.path.iterdir() if (found := _NAME.fullmatch(path.name)))

    def last_good(self, *, before: int | None = None) -> Checkpoint | None:
        """Return the newest checkpoint whose files are as they were written, of a step below `before`; None without
        any. Each broken one on the way is logged. Changes nothing: another process may be writing one."""
        for step in reversed(self.steps()):
            if before is not None and step >= before:
                continue
            try:
                return read_checkpoint(self.path / f"checkpoint-{step}")
            except BrokenCheckpointError as error:
                logger.warning("%s; the one before it is used", error)
        return None

    def _remove_old(self, written: int) -> None:
        """Keep the newest ones up to the one that was just written. Later ones do not count: a run that goes on from an
        earlier checkpoint found them broken."""
        steps = [step for step in self.steps() if step <= written]
        for step in steps[: -self._limit] if self._limit else ():
            shutil.rmtree(self.path / f"checkpoint-{step}", ignore_errors=True)

    def tidy(self) -> None:
        """Remove what an interrupted `write` has left; what it was about to replace takes its place again. For the
        process that writes here."""
        for path in self.path.glob(f"{_REPLACED}*"):
            place = self.path / f"checkpoint-{path.name.removeprefix(_REPLACED)}"
            if not place.exists():
                os.rename(path, place)
        for path in [*self.path.glob(f"{_UNFINISHED}*"), *self.path.glob(f"{_REPLACED}*")]:
            shutil.rmtree(path, ignore_errors=True)


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Return a checkpoint after its files were checked.

    Raises:
        BadRequestError: there is none at this place, or a later release wrote it.
        BrokenCheckpointError: a file is missing, cut, or changed; names it.
    """
    path = Path(path)
    if not path.is_dir():
        raise BadRequestError(f"There is no checkpoint {str(path)!r}: it is no folder")
    manifest = _manifest(path)
    if manifest["format"] > FORMAT:
        raise BadRequestError(
            f"The checkpoint {str(path)!r} has format {manifest['format']}, and this release reads {FORMAT}: "
            "use the release that wrote it, or a later one"
        )
    for name, wanted in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise BrokenCheckpointError(f"The checkpoint {str(path)!r} is broken: {name} is missing")
        if (size := file.stat().st_size) != wanted["bytes"]:
            text = f"{name} has {size} bytes instead of {wanted['bytes']}"
            raise BrokenCheckpointError(f"The checkpoint {str(path)!r} is broken: {text}")
        if sha256_of(file) != wanted["sha256"]:
            raise BrokenCheckpointError(f"The checkpoint {str(path)!r} is broken: {name} is not what was written")
    return Checkpoint(path, manifest["step"], manifest["facts"])


def _manifest(path: Path) -> dict[str, Any]:
    try:
        read = json.loads((path / MANIFEST).read_bytes())
        manifest: dict[str, Any] = {"format": int(read["format"]), "step": int(read["step"])}
        manifest |= {"files": dict(read["files"]), "facts": dict(read["facts"])}
    except FileNotFoundError:
        raise BrokenCheckpointError(f"The checkpoint {str(path)!r} is broken: {MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenCheckpointError(f"The checkpoint {str(path)!r} is broken: {MANIFEST}: {error}") from None
    return manifest


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _flushed(file: Path) -> dict[str, object]:
    """Flush a file to the disk, close it to others, and return its size and SHA-256."""
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
