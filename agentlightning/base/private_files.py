"""Files and folders that only their owner can read, regardless of the umask.

Files of this package hold tasks, conversations and sometimes keys. They get mode 0600, and folders created for them get
0700. An existing file loses the permissions of group and others. If the group can write the file, the file is shared
with the group, and the group keeps its permissions. Existing folders keep their mode.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import IO, Any, Literal

_OURS = 0o700
_SHARED = 0o770
_GROUP_WRITES = 0o020


def open_private(path: str | Path, mode: Literal["w", "a"]) -> IO[str]:
    """Open a text file (UTF-8) for writing and restrict it to its owner. The file is created if it does not exist.

    Raises:
        OSError: same as `open`.
    """
    file = open(path, mode, encoding="utf-8", opener=_opener)  # noqa: SIM115 -- the caller closes it
    _tighten(os.fstat(file.fileno()), file.fileno())
    return file


def make_private(path: str | Path) -> None:
    """Create an empty file if it does not exist, and restrict it to its owner. Does not open an existing file, because
    closing it would release the locks that this process has on it.

    Raises:
        OSError: the file cannot be created.
    """
    place = os.path.realpath(path)
    try:
        os.close(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        tighten(place)


def tighten(path: str | Path) -> None:
    """Restrict a file of this user to its owner; do nothing if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        _tighten(os.stat(path), os.fspath(path))


def private_folder(path: str | Path) -> Path:
    """Create a folder and its missing parents with mode 0700, and return it.

    Raises:
        OSError: the folder cannot be created, or the path is a file.
    """
    folder = Path(path)
    for missing in reversed([place for place in (folder, *folder.parents) if not place.exists()]):
        with contextlib.suppress(FileExistsError):
            missing.mkdir(mode=0o700)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _ours(status: os.stat_result) -> bool:
    """Return True if this user owns the file, or if files have no owner (Windows)."""
    return not hasattr(os, "geteuid") or status.st_uid == os.geteuid()


def _opener(path: Any, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _tighten(status: os.stat_result, file: int | str) -> None:
    mode = stat.S_IMODE(status.st_mode)
    new_mode = mode & (_SHARED if mode & _GROUP_WRITES else _OURS)
    if mode != new_mode and stat.S_ISREG(status.st_mode) and _ours(status):
        with contextlib.suppress(PermissionError, NotImplementedError):  # a file system without modes
            os.chmod(file, new_mode)
