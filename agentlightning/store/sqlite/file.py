"""The file of a SQLite store: reading it while a store uses it, and copying it.

A reader sees the file at one moment (a read transaction of the write-ahead log), blocks no writer, and upgrades no
tables. Source of the copy's guarantee: https://www.sqlite.org/backup.html
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
"""Pages copied between two points at which the copy may be interrupted."""


def backup_file(path: str | Path, target: str | Path, *, force: bool = False) -> int:
    """Copy the store in `path` at one moment to the file `target`; return the size of the copy in bytes.

    The copy is one self-contained file. It passes SQLite's integrity check before it gets its name, and a crash leaves
    no partial file under that name. `force` replaces a file of that name.

    Raises:
        BadRequestError: `path` is no file that can be read as SQLite, or there is no folder for `target`.
        ConflictError: `path` holds no store, or `target` is taken or in use.
        StoreWriteError: the copy could not be written, or the check found it damaged.
    """
    path, target = Path(path), Path(target)
    with reading(path) as db:
        schema_version(db, path)
        if not target.parent.is_dir():
            raise BadRequestError(f"There is no folder {str(target.parent)!r} for the backup {target.name!r}")
        if target.exists() and target.samefile(path):
            raise ConflictError(f"{str(target)!r} is the store itself; choose another file for its backup")
        if target.exists() and not force:
            raise ConflictError(f"{str(target)!r} is there already; choose another file, or replace it with --force")
        log = target.with_name(target.name + "-wal")
        if log.exists():  # SQLite would apply it to the copy
            raise ConflictError(
                f"{str(log)!r} is there: {str(target)!r} is a store in use, or one that was not closed. "
                "Choose another file, or open and close that store first."
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
        BadRequestError: there is none, or it cannot be opened.
    """
    if not path.is_file():
        raise BadRequestError(f"There is no store file {str(path)!r}; expected one that 'agl store' or a program made")
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
        ConflictError: it holds no store.
    """
    try:
        version: int = db.execute("PRAGMA user_version").fetchone()[0]
        tables = {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.DatabaseError as error:
        raise BadRequestError(f"Cannot read {str(path)!r} as a SQLite store: {error}") from error
    if version < 1 or not {"rollouts", "spans", "rows"} <= tables:
        raise ConflictError(f"The file {str(path)!r} is a SQLite database of another program, and holds no store")
    return version


def integrity(db: sqlite3.Connection) -> Iterator[str]:
    """Yield the problems that SQLite's own check of the structure reports."""
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
        copy.execute("PRAGMA journal_mode = DELETE")  # no second file beside the copy
        damage = list(integrity(copy))
    except sqlite3.Error as error:
        raise StoreWriteError(f"The store {str(path)!r} could not be copied: {error}") from error
    finally:
        copy.close()
    if damage:
        raise StoreWriteError(f"The store {str(path)!r} is damaged, no backup was made: {'; '.join(damage[:3])}")


def _give_name(partial: Path, target: Path, force: bool) -> None:
    """Make the copy durable and rename it, in one step that does not overwrite unless `force`."""
    _sync(partial)
    try:
        if force:
            os.replace(partial, target)
        else:
            os.link(partial, target)
    except FileExistsError:
        raise ConflictError(f"{str(target)!r} has appeared meanwhile; choose another file, or --force") from None
    except OSError:  # a file system without hard links
        os.rename(partial, target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
