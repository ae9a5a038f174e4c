"""The folder of one Harbor trial, and the removal of what a killed runner left behind.

A runner holds a lock on the folder of each of its trials. A folder without a lock belongs to a runner that was killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentlightning.litagent.command.sandbox import remove_left_groups

logger = logging.getLogger(__name__)

BASE = Path("/var/tmp")
"""Not TMPDIR, which other users often may not enter, as a sandbox of a runner that is root must."""
_RECORD = "trial.json"


@dataclass(frozen=True, slots=True)
class TrialFolder:
    """A folder that exists while its trial runs."""

    path: Path

    @property
    def trials(self) -> Path:
        """The folder for the output of Harbor."""
        return self.path / "trials"

    def record(self, config: dict[str, Any]) -> None:
        """Store the configuration of the trial, by which its sandbox is found after a kill."""
        with open(os.open(self.path / _RECORD, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(config, file)


def parent_folder() -> Path:
    """Return the folder for the trials of this user on this machine.

    Raises:
        RuntimeError: another user has made it.
    """
    path = BASE / f"agl-harbor-{os.geteuid()}"
    path.mkdir(mode=0o711, exist_ok=True)
    status = path.lstat()
    if path.is_symlink() or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise RuntimeError(f"{path} must be a folder that only its owner, user {os.geteuid()}, can write to. Remove it")
    path.chmod(0o711)
    return path


@contextlib.contextmanager
def trial_folder(name: str) -> Generator[TrialFolder]:
    """Make a folder for a trial, hold its lock, and remove it at the end."""
    import fcntl  # POSIX only, like the sandboxes

    while True:
        folder = TrialFolder(Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent_folder())))
        with contextlib.suppress(FileNotFoundError):
            lock = _opened(folder.path)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink > 0:
                break
            os.close(lock)  # another runner took it for one that was left
    try:
        folder.path.chmod(0o711)
        folder.trials.mkdir(mode=0o700)
        yield folder
    finally:
        try:
            shutil.rmtree(folder.path, ignore_errors=True)
        finally:
            os.close(lock)


def left_behind() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the folders of trials whose runner was killed, each with the recorded configuration; each is then removed.

    Trials without a record have started no sandbox. Each folder is locked while it is handled.
    """
    import fcntl

    for path in sorted(parent_folder().iterdir()):
        try:
            lock = _opened(path)
        except OSError:  # it has been removed
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_nlink == 0:
                continue
            try:
                config: dict[str, Any] = json.loads((path / _RECORD).read_bytes())
            except (OSError, ValueError):
                config = {}
            yield path, config
            remove_left_groups(path.name)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:  # its runner works
            continue
        finally:
            os.close(lock)


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
