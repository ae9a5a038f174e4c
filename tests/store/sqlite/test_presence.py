"""A store whose files are removed, replaced or truncated acknowledges nothing that would be lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentlightning.errors import StoreWriteError
from agentlightning.store import LightningStoreClient, SQLiteLightningStore
from agentlightning.store.sqlite.presence import Presence


def delete(suffix: str) -> Callable[[Path], None]:
    return lambda path: os.unlink(f"{path}{suffix}")


def replace(path: Path) -> None:
    with sqlite3.connect(path.with_name("other.db")) as other:
        other.execute("CREATE TABLE t (x)")
    other.close()
    os.replace(path.with_name("other.db"), path)


def move_away(path: Path) -> None:
    path.rename(path.with_name("elsewhere.db"))


def remove_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


def cut(suffix: str, size: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        assert os.stat(f"{path}{suffix}").st_size > size
        os.truncate(f"{path}{suffix}", size)

    return change


LOSSES = {
    "database deleted": delete(""),
    "log deleted": delete("-wal"),
    "shared memory deleted": delete("-shm"),
    "database replaced": replace,
    "database moved away": move_away,
    "folder removed": remove_folder,
    "database emptied": cut("", 0),
    "database cut": cut("", 8192),
    "log emptied": cut("-wal", 0),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data" / "store.db"


@pytest.fixture
def server(path: Path) -> Iterator[str]:
    """The address of `agl store` as a process of its own."""
    command = [sys.executable, "-m", "agentlightning.cli", "store", "--port", "0", "--db", str(path)]
    with (
        path.parent.with_name("log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.send_signal(signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
async def test_nothing_that_is_asked_after_the_loss_is_acknowledged(loss: str, server: str, path: Path) -> None:
    before: list[str] = []
    after: list[str] = []
    refusals: set[str] = set()
    lost = asyncio.Event()
    reached = defaultdict[int, asyncio.Event](asyncio.Event)

    async def load() -> None:
        client = LightningStoreClient(server, deadline=5.0)
        for _ in range(60):
            if len(before) > 200:
                await lost.wait()
            acknowledged = after if lost.is_set() else before
            try:
                acknowledged.append((await client.enqueue_rollout("x" * 200)).rollout_id)
                reached[len(before)].set()
            except StoreWriteError as error:
                refusals.add(str(error))
        await client.close()

    tasks = [asyncio.create_task(load()) for _ in range(6)]
    await reached[75].wait()
    db = sqlite3.connect(path)
    db.execute("PRAGMA wal_checkpoint(PASSIVE)")  # data is in the database, and not in the log alone
    db.close()
    await reached[150].wait()
    LOSSES[loss](path)
    lost.set()
    await asyncio.gather(*tasks)
    assert len(before) >= 150
    assert after == []
    assert refusals  # more than one text, perhaps: the files of a folder are removed one after the other
    assert all(str(path) in refusal and "agl rollouts export" in refusal for refusal in refusals)


def test_a_log_that_is_emptied_while_a_transaction_runs_is_noticed_though_it_grows_again(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("CREATE TABLE t (x)")
        presence = Presence(str(path))
        presence.begin(db)
        db.execute("BEGIN IMMEDIATE")
        before = os.stat(presence.log).st_size
        os.truncate(presence.log, 0)
        db.execute("INSERT INTO t VALUES (1)")
        db.execute("COMMIT")
        assert os.stat(presence.log).st_size > before
        for look in (presence.check, lambda: presence.begin(db)):
            with pytest.raises(StoreWriteError, match="its write-ahead log was truncated"):
                look()


async def test_what_is_there_can_still_be_read(path: Path) -> None:
    store = SQLiteLightningStore(path)
    made = await store.enqueue_rollout("x")
    os.unlink(path)
    for write in (
        lambda: store.enqueue_rollout("y"),
        lambda: store.dequeue_rollout(),
        lambda: store.update_worker("w"),
    ):
        with pytest.raises(StoreWriteError, match=r"store\.db.*deleted or moved away"):
            await write()
    assert [rollout.rollout_id for rollout in await store.query_rollouts()] == [made.rollout_id]
    await store.close()


async def test_a_file_that_is_put_back_is_written_again(path: Path) -> None:
    store = SQLiteLightningStore(path)
    await store.enqueue_rollout(1)
    os.rename(path, path.with_name("elsewhere.db"))
    with pytest.raises(StoreWriteError):
        await store.enqueue_rollout(2)
    os.rename(path.with_name("elsewhere.db"), path)
    await store.enqueue_rollout(3)
    assert [rollout.input for rollout in await store.query_rollouts()] == [1, 3]
    await store.close()


async def test_a_file_deleted_before_the_first_write_is_not_made_anew(path: Path) -> None:
    store = SQLiteLightningStore(path)
    os.unlink(path)
    with pytest.raises(StoreWriteError, match="deleted or moved away"):
        await store.enqueue_rollout(1)
    assert path.name not in os.listdir(path.parent)
    await store.close()


async def test_what_other_programs_may_do_to_the_files_disturbs_nobody(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = path.with_name("link.db")
    os.symlink(path, link)
    store = SQLiteLightningStore(link)
    made = [await store.enqueue_rollout("x" * 10_000) for _ in range(50)]
    for rollout in made[:40]:
        await store.delete_rollouts(rollout_ids=[rollout.rollout_id], force=True)
    size = os.stat(path).st_size
    db = sqlite3.connect(path, isolation_level=None)
    for statement in ("PRAGMA wal_checkpoint(TRUNCATE)", "VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)"):
        db.execute(statement)
        await store.enqueue_rollout(statement)
    assert os.stat(path).st_size < size or size == 4096
    db.close()
    monkeypatch.chdir("/")
    await store.enqueue_rollout("elsewhere")
    assert len(await store.query_rollouts()) == 14
    await store.close()
