"""Whatever is written has one reader, its owner: every kind of file that the package makes, under the widest umask."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentlightning.base.private_files import make_private, open_private, private_folder
from agentlightning.cli import main
from agentlightning.llm_proxy.recording.journal import Journal
from agentlightning.llm_proxy.recording.replay import CallFile
from agentlightning.logging import setup
from agentlightning.store.sqlite import SQLiteLightningStore
from agentlightning.training.run_folder import RunFolder, new_run_folder
from tests.stubs.processes import run_program

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs modes of files (POSIX)")


@pytest.fixture(autouse=True)
def widest_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def open_to_others(folder: Path) -> dict[str, str]:
    """Return every file and folder below that somebody else may use, with its mode."""
    modes = {path: path.lstat().st_mode for path in folder.rglob("*")}
    assert modes, "nothing was written"
    return {str(path.relative_to(folder)): oct(stat.S_IMODE(mode)) for path, mode in modes.items() if mode & 0o077}


async def test_a_store_its_log_its_backup_and_what_is_exported_of_it(tmp_path: Path) -> None:
    store = SQLiteLightningStore(tmp_path / "agl.db")
    await store.enqueue_rollout("a task")
    assert {"agl.db", "agl.db-wal", "agl.db-shm"} <= set(os.listdir(tmp_path))
    file = str(tmp_path / "agl.db")
    assert await asyncio.to_thread(main, ["store", "backup", str(tmp_path / "copy.db"), "--db", file]) == 0
    export = ["rollouts", "export", "--store", file, "--out", str(tmp_path / "out.jsonl")]
    assert await asyncio.to_thread(main, export) == 0
    assert open_to_others(tmp_path) == {}
    await store.close()


@pytest.mark.parametrize("mode", [0o644, 0o666, 0o604])
async def test_a_store_of_an_older_release_is_closed_to_others_when_it_is_opened(tmp_path: Path, mode: int) -> None:
    earlier = SQLiteLightningStore(tmp_path / "agl.db")
    await earlier.enqueue_rollout("a task")
    for name in os.listdir(tmp_path):
        os.chmod(tmp_path / name, mode & ~0o020)
    later = SQLiteLightningStore(tmp_path / "agl.db")
    await later.enqueue_rollout("another")
    assert open_to_others(tmp_path) == {}
    assert len(await earlier.query_rollouts()) == 2
    await later.close()
    await earlier.close()


async def test_a_store_that_is_shared_with_a_group_stays_so(tmp_path: Path) -> None:
    (tmp_path / "agl.db").touch(mode=0o664)
    store = SQLiteLightningStore(tmp_path / "agl.db")
    await store.enqueue_rollout("a task")
    assert set(open_to_others(tmp_path).values()) == {"0o660"}
    await store.close()


def test_what_a_gateway_records_and_its_journal(tmp_path: Path) -> None:
    call_file = CallFile(tmp_path / "made" / "deep" / "calls.jsonl", None)
    call_file.record("chat/completions", {"messages": []}, {"choices": []})
    call_file.close()
    journal = Journal(tmp_path / "other" / "journal")
    journal.open()
    journal.close()
    wide = tmp_path / "wide"
    wide.touch(mode=0o666)
    wide.chmod(0o644)
    journal = Journal(wide)
    journal.open()
    journal.close()
    assert open_to_others(tmp_path) == {}


def test_the_folder_of_a_run_and_what_is_in_it(tmp_path: Path) -> None:
    folder = RunFolder(new_run_folder(tmp_path / "runs"))
    folder.write_config(trainer={"n_runners": 1})
    folder.append_metrics({"reward": 1.0})
    assert json.loads((folder.path / "config.json").read_text())["trainer"] == {"n_runners": 1}
    assert open_to_others(tmp_path) == {}


def test_a_log(tmp_path: Path) -> None:
    name = "agentlightning.of_this_test"
    setup(console=False, files={name: tmp_path / "logs" / "run.log"})
    logger = logging.getLogger(name)
    logger.warning("a line")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    assert "a line" in (tmp_path / "logs" / "run.log").read_text()
    assert open_to_others(tmp_path) == {}


# --- the parts they are made of --------------------------------------------------------------------------------------


def test_an_existing_folder_stays_as_it_is_and_new_ones_within_are_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    made = private_folder(tmp_path / "a" / "b")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path, made.parent, made)] == [0o755, 0o700, 0o700]
    assert private_folder(made) == made


def test_a_device_keeps_its_mode() -> None:
    before = os.stat(os.devnull).st_mode
    with open_private(os.devnull, "w") as file:
        file.write("nothing")
    make_private(os.devnull)
    assert os.stat(os.devnull).st_mode == before


def test_a_link_to_a_file_that_is_to_be_made_leads_to_a_closed_one(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "real.db")
    make_private(tmp_path / "link.db")
    assert stat.S_IMODE((tmp_path / "real.db").stat().st_mode) == 0o600


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX locks")
def test_closing_a_file_to_others_releases_no_lock_of_this_process(tmp_path: Path) -> None:
    path = tmp_path / "held.db"
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("PRAGMA journal_mode = DELETE")
    holder.execute("CREATE TABLE t (x)")
    holder.execute("BEGIN EXCLUSIVE")
    path.chmod(0o644)
    make_private(path)
    code = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('SELECT * FROM t')"
    assert "database is locked" in run_program("python", "-c", code, path, code=1).stderr
    holder.execute("COMMIT")
    holder.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
