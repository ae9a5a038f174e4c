"""The folder of one attempt of a program. It is held open: whatever the program puts in its place is never followed."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a link"}


class UnusableFile(ValueError):
    """A file is not what may be read; says what it is."""


class AttemptFolder:
    """Made when it is constructed, mode 0700, and owned by `owner` (user and group) or by us. Its methods block."""

    def __init__(self, owner: tuple[int, int] | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="agl-attempt-"))
        self._descriptor = _open_folder(self.path)
        self._owner = owner
        if owner is not None:
            os.fchown(self._descriptor, *owner)

    def write(self, name: str, data: bytes) -> None:
        """Write a new file, mode 0600."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(name, flags, 0o600, dir_fd=self._descriptor), "wb") as file:
            file.write(data)
            if self._owner is not None:
                os.fchown(file.fileno(), *self._owner)

    def read(self, name: str, most_bytes: int) -> bytes:
        """Return what a file holds: a regular one, of the program's own, of one name and at most `most_bytes`.

        Opening it follows no link and waits for nobody.

        Raises:
            FileNotFoundError: there is none.
            UnusableFile: it is something else, or cannot be read.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, dir_fd=self._descriptor)
        except FileNotFoundError:
            raise
        except OSError as error:
            what = "is a link" if error.errno == errno.ELOOP else f"cannot be opened ({error.strerror})"
            raise UnusableFile(f"{what}; expected a regular file") from None
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                kind = _KINDS.get(stat.S_IFMT(found.st_mode), "a device")
                raise UnusableFile(f"is {kind}; expected a regular file")
            if found.st_nlink > 1:
                raise UnusableFile(f"has {found.st_nlink} names (hard links); expected a file of the attempt's own")
            if found.st_uid != (os.geteuid() if self._owner is None else self._owner[0]):
                raise UnusableFile(f"belongs to the user {found.st_uid}; expected a file of the program's own")
            if found.st_size > most_bytes:
                raise UnusableFile(f"holds {found.st_size} bytes, which is more than {most_bytes}")
            data = os.read(descriptor, most_bytes + 1)
            while len(data) <= most_bytes and (more := os.read(descriptor, most_bytes + 1 - len(data))):
                data += more
        except OSError as error:
            raise UnusableFile(f"cannot be read ({error.strerror})") from None
        finally:
            os.close(descriptor)
        if len(data) > most_bytes:
            raise UnusableFile(f"holds more than {most_bytes} bytes")
        return data

    def remove(self) -> None:
        """Remove it with everything in it, wherever the program has moved it; a warning if something resists."""
        try:
            if os.geteuid() != 0:  # root needs no rights
                os.fchmod(self._descriptor, 0o700)
            try:
                here = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
            except OSError:  # the system does not tell
                here = self.path
            _empty(self._descriptor)
            if os.fstat(self._descriptor).st_nlink > 0:  # the program may have removed it
                os.rmdir(here)
            _remove_impostor(self.path)
        except OSError as error:
            logger.warning("The folder %s of an attempt could not be removed: %s", self.path, error)
        finally:
            os.close(self._descriptor)


def _remove_impostor(path: Path) -> None:
    """Remove what a program has put where its folder was. A link goes, what it points to stays."""
    try:
        if not stat.S_ISDIR(path.lstat().st_mode):
            path.unlink()
            return
    except FileNotFoundError:
        return
    descriptor = _opened(path, None)
    try:
        _empty(descriptor)
    finally:
        os.close(descriptor)
    path.rmdir()


def _empty(folder: int) -> None:
    """Remove what is in an open folder. Folders within its folders are first moved up into it: no depth takes a stack,
    a descriptor for each level, or a path that is too long."""
    names = (f".agl-{number}" for number in itertools.count())
    while entries := list(itertools.islice(_entries(folder), 10_000)):
        for name, is_folder in entries:
            if not is_folder:
                os.unlink(name, dir_fd=folder)
                continue
            inner = _opened(name, folder)
            try:
                while below := list(itertools.islice(_entries(inner), 10_000)):
                    for entry, is_folder_too in below:
                        if is_folder_too:
                            _free(entry, inner)
                            os.rename(entry, _unused(folder, names), src_dir_fd=inner, dst_dir_fd=folder)
                        else:
                            os.unlink(entry, dir_fd=inner)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=folder)


def _entries(folder: int) -> Iterator[tuple[str, bool]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            yield entry.name, entry.is_dir(follow_symlinks=False)


def _opened(name: str | Path, folder: int | None) -> int:
    _free(name, folder)
    return _open_folder(name, folder)


def _open_folder(path: str | Path, folder: int | None = None) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)


def _free(name: str | Path, folder: int | None) -> None:
    """Give us the rights over a folder that its program has taken away."""
    if os.geteuid() != 0:
        os.chmod(name, 0o700, dir_fd=folder)


def _unused(folder: int, names: Iterator[str]) -> str:
    for name in names:
        try:
            os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return name
    raise AssertionError("names never end")
