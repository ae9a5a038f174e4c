"""Read and copy the file of a SQLite store while it is in use.

A reader has a snapshot of the file (a read transaction of the write-ahead log), blocks no writer, and upgrades no
tables. Source of the guarantee for the copy: https://www.sqlite.org/backup.html
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Generator, Iterator
from pathlib import Path

from agentlightning.base.private_files import make_private
from agentlightning.errors import BadRequestError, ConflictError, StoreWriteError

_PAGES = 1024
"""Number of pages copied in one step. The copy can be interrupted between two steps."""


def backup_file(path: str | Path, target: str | Path, *, force: bool = False) -> int:
    """Copy a snapshot of the store in `path` to the file `target`; return the size of the copy in bytes.

    The copy is one self-contained file. It is renamed to `target` after it has passed SQLite's integrity check, so a
    crash leaves no partial file with this name. `force` replaces an existing file.

    Raises:
        BadRequestError: `path` cannot be read as SQLite, or the folder of `target` does not exist.
        ConflictError: `path` contains no store, or `target` exists or is in use.
        StoreWriteError: the copy could not be written, or the check found it damaged.
    """
    path, target = Path(path), Path(target)
    with reading(path) as db:
        schema_version(db, path)
        if not target.parent.is_dir():
            raise BadRequestError(f"The folder {str(target.parent)!r} for the backup {target.name!r} does not exist")
        if target.exists() and target.samefile(path):
            raise ConflictError(f"{str(target)!r} is the store itself; choose another file for its backup")
        if target.exists() and not force:
            raise ConflictError(f"{str(target)!r} exists already; choose another file, or replace it with --force")
        log = target.with_name(target.name + "-wal")
        if log.exists():  # SQLite would apply it to the copy
            raise ConflictError(
                f"{str(log)!r} exists: {str(target)!r} is a store that is in use or was not closed. "
                "Choose another file, or open and close this store first."
            )
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            _copy(db, path, partial)
            _give_name(partial, target, force)
        except StoreWriteError:
            raise
        except OSError as error:
            raise StoreWriteError(f"The backup {str(target)!r} could not be written: {error}") from error
        finally:
            partial.unlink(missing_ok=True)
    return target.stat().st_size


# --- reading a file ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def reading(path: Path) -> Generator[sqlite3.Connection]:
    """Open an existing file inside one read transaction.

    Raises:
        BadRequestError: the file does not exist or cannot be opened.
    """
    if not path.is_file():
        raise BadRequestError(f"There is no store file {str(path)!r}; pass a file that a store has created")
    try:
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, isolation_level=None, timeout=10.0)
    except sqlite3.Error as error:
        raise BadRequestError(f"Cannot open the SQLite store {str(path)!r}: {error}") from error
    try:
        db.execute("BEGIN")
        yield db
    finally:
        db.close()


def schema_version(db: sqlite3.Connection, path: Path) -> int:
    """Return the version of a store's tables.

    Raises:
        BadRequestError: the file cannot be read as SQLite.
        ConflictError: the file contains no store.
    """
    try:
        version: int = db.execute("PRAGMA user_version").fetchone()[0]
        tables = {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.DatabaseError as error:
        raise BadRequestError(f"Cannot read {str(path)!r} as a SQLite store: {error}") from error
    if version < 1 or not {"rollouts", "spans", "rows"} <= tables:
        raise ConflictError(f"The file {str(path)!r} is a SQLite database of another program and contains no store")
    return version


def integrity(db: sqlite3.Connection) -> Iterator[str]:
    """Yield the problems that the integrity check of SQLite reports."""
    for (line,) in db.execute("PRAGMA integrity_check"):
        if line != "ok":
            yield f"SQLite: {line}"


# --- the copy ------------------------------------------------------------------------------------------------------


def _copy(db: sqlite3.Connection, path: Path, partial: Path) -> None:
    partial.unlink(missing_ok=True)
    try:
        make_private(partial)
        copy = sqlite3.connect(partial, isolation_level=None)
    except (sqlite3.Error, OSError) as error:
        raise StoreWriteError(f"The backup cannot be written in {str(partial.parent)!r}: {error}") from error
    try:
        copy.execute("PRAGMA synchronous = OFF")  # made durable in one step, by `_give_name`
        db.backup(copy, pages=_PAGES)
        copy.execute("PRAGMA journal_mode = DELETE")  # no second file next to the copy
        damage = list(integrity(copy))
    except sqlite3.Error as error:
        raise StoreWriteError(f"The store {str(path)!r} could not be copied: {error}") from error
    finally:
        copy.close()
    if damage:
        raise StoreWriteError(f"The store {str(path)!r} is damaged; no backup was created: {'; '.join(damage[:3])}")


def _give_name(partial: Path, target: Path, force: bool) -> None:
    """Make the copy durable and rename it, in one step that does not overwrite unless `force`."""
    _sync(partial)
    try:
        if force:
            os.replace(partial, target)
        else:
            os.link(partial, target)
    except FileExistsError:
        raise ConflictError(f"{str(target)!r} was created meanwhile; choose another file, or use --force") from None
    except OSError:  # a file system without hard links
        os.rename(partial, target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
