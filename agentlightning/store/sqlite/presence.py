"""Detects that the files of an open SQLite store were deleted or replaced.

A process can still write a deleted file that it has open, but the data is lost when the process ends. So the store
checks its files before it acknowledges a change: database, write-ahead log and shared memory must be the same files
(device and inode), and neither missing nor shorter than before. The log must also begin with the bytes of a log,
because a log that was truncated during a transaction grows again as the transaction is written. The check does not
detect other changes of the contents.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

from agentlightning.errors import StoreWriteError

_SMALLEST = 512
"""Smallest size of a page in bytes."""
_LOG_BEGINS = (b"\x37\x7f\x06\x82", b"\x37\x7f\x06\x83")
"""The first bytes of every write-ahead log that is not empty (SQLite's file format, section 4.1)."""
_PARTS = {"": "the database", "-wal": "its write-ahead log", "-shm": "the shared memory of its log"}


class Presence:
    """The files of a store as one process opened them. Create it after a transaction, so that all three files exist.

    `database` is the database file that the parent of this process opened, if any: a later process must not use
    another file.
    """

    def __init__(self, path: str) -> None:
        self._path = os.path.abspath(path)
        self._real = os.path.realpath(path)
        """Path of the database with resolved links. SQLite keeps its other two files next to it."""
        self.log = f"{self._real}-wal"
        stat = _stat(self._path)
        self.database = None if stat is None else (stat.st_dev, stat.st_ino)
        self._others: dict[str, tuple[int, int]] = {}
        self._size = self._log_size = 0
        self._damage = ""
        """Damage of the contents as text. Once set, it is kept."""

    def check_database(self) -> None:
        """Check that the name still refers to the database that was opened.

        Raises:
            StoreWriteError: the name refers to another file or none. The call stored nothing.
        """
        self._check("", self.database, _stat(self._path))

    def begin(self, db: sqlite3.Connection) -> None:
        """Check all files before a transaction, and accept files that are not known yet.

        Raises:
            StoreWriteError: a file is missing, replaced or truncated.
        """
        size, log_size = self._check_files()
        if not self._damage and (size < self._size or log_size < self._log_size):
            self._damage = self._damage_of(db, size)
        if self._damage:
            raise self._lost(self._damage)
        self._size, self._log_size = size, log_size

    def check(self) -> None:
        """Check all files, after a transaction and before it is acknowledged.

        Raises:
            StoreWriteError: a file is missing or replaced, or the log was truncated. The data of the transaction is
                lost.
        """
        self._check_files()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            log = os.open(self.log, os.O_RDONLY)
            try:
                begins = os.read(log, 4)
            finally:
                os.close(log)
            if begins and begins not in _LOG_BEGINS:
                self._damage = "its write-ahead log was truncated"
                raise self._lost(self._damage)

    def _check_files(self) -> tuple[int, int]:
        """Check that no file is missing or replaced; return the sizes of the database and its log."""
        database = _stat(self._path)
        self._check("", self.database, database)
        log, memory = _stat(self.log), _stat(f"{self._real}-shm")
        for suffix, stat in (("-wal", log), ("-shm", memory)):
            if stat is not None:
                self._others.setdefault(suffix, (stat.st_dev, stat.st_ino))
            self._check(suffix, self._others.get(suffix), stat)
        return database.st_size if database else 0, log.st_size if log else 0

    def _check(self, suffix: str, expected: tuple[int, int] | None, stat: os.stat_result | None) -> None:
        if expected is None or (stat is not None and (stat.st_dev, stat.st_ino) == expected):
            return
        what = "was deleted or moved away" if stat is None else "was replaced by another file"
        raise self._lost(f"{_PARTS[suffix]} {what}")

    def _damage_of(self, db: sqlite3.Connection, size: int) -> str:
        """Return the damage of a file that has become shorter; empty if it is intact, for example after VACUUM or a
        checkpoint of another program."""
        if size < _SMALLEST:  # SQLite would take it for a new one and delete the log
            return "the database was emptied"
        try:
            pages, _ = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1:]
            page = db.execute("PRAGMA page_size").fetchone()[0]
            log = _stat(self.log)
            if pages > 0 and (log is None or log.st_size < 32 + pages * (24 + page)):
                return "its write-ahead log was truncated"
            fresh = sqlite3.connect(Path(self._path).as_uri() + "?mode=rw", uri=True)  # trusts no page in memory
            with contextlib.closing(fresh):
                problem: str = fresh.execute("PRAGMA quick_check(1)").fetchone()[0]
        except sqlite3.DatabaseError as error:
            problem = str(error)
        return "" if problem == "ok" else f"the database was truncated or damaged ({' '.join(problem.split())})"

    def _lost(self, what: str) -> StoreWriteError:
        return StoreWriteError(
            f"The SQLite store {self._path!r} is not the file that this process opened: {what}. The store does not "
            "write any more, because the data would be lost when this process ends. Copy what can still be read (from "
            "a running server with 'agl rollouts export --store ADDRESS'), end all processes that use the store, "
            "restore the file or a backup, and start again. This call can be repeated with its token."
        )


def _stat(path: str) -> os.stat_result | None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return os.stat(path)
    return None
