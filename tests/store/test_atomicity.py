"""A claim is one worker's; acknowledged writes survive a kill. (Aborted scripts: `test_faults.py`.)"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import BadRequestError, ConflictError
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.store.spec import store_from_spec
from agentlightning.store.sqlite import SQLiteLightningStore
from agentlightning.types import EnqueueRolloutRequest


def test_threads_and_processes_claim_each_rollout_once(tmp_path: Path) -> None:
    path = tmp_path / "race.db"
    count = 400
    store = SQLiteLightningStore(path, synchronous="NORMAL")
    asyncio.run(_fill(store, count))
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        children = pool.map_async(_claim_all, [str(path)] * 2)
        claims: list[str] = []
        threads = [threading.Thread(target=lambda: claims.extend(asyncio.run(_drain(store)))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for ids in children.get(60):
            claims.extend(ids)
    asyncio.run(store.close())
    assert len(claims) == len(set(claims)) == count


async def _fill(store: SQLiteLightningStore | InMemoryLightningStore, count: int) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(count)])


async def _drain(store: Any) -> list[str]:
    ids: list[str] = []
    while (claim := await store.dequeue_rollout(worker_id="w")) is not None:
        ids.append(claim.rollout_id)
    return ids


def _claim_all(path: str) -> list[str]:
    async def work() -> list[str]:
        store = SQLiteLightningStore(path, synchronous="NORMAL")
        ids = await _drain(store)
        await store.close()
        return ids

    return asyncio.run(work())


def test_threads_claim_from_memory_each_once() -> None:
    store = InMemoryLightningStore()
    asyncio.run(_fill(store, 2000))
    claims: list[str] = []
    threads = [threading.Thread(target=lambda: claims.extend(asyncio.run(_drain(store)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(claims) == len(set(claims)) == 2000


_WRITER = """
import asyncio, sys
from agentlightning.store.sqlite import SQLiteLightningStore

async def work():
    store = SQLiteLightningStore(sys.argv[1])
    while True:
        made = await asyncio.gather(*[store.enqueue_rollout(i) for i in range(4)])
        print(*[r.rollout_id for r in made], flush=True)

asyncio.run(work())
"""


@pytest.mark.parametrize("lines", [1, 3, 9])
def test_what_was_acknowledged_survives_kill_9(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "kill.db"
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    acknowledged = [writer.stdout.readline() for _ in range(lines)]
    os.kill(writer.pid, signal.SIGKILL)
    acknowledged.append(writer.stdout.read())
    writer.wait()
    writer.stdout.close()
    acknowledged_ids = {name for line in acknowledged[:lines] for name in line.split()}
    store = SQLiteLightningStore(path)
    stored_ids = {rollout.rollout_id for rollout in asyncio.run(store.query_rollouts())}
    assert acknowledged_ids <= stored_ids
    assert len(asyncio.run(_drain(store))) == len(stored_ids)
    asyncio.run(store.close())
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()


async def test_a_claim_outlives_the_server_and_keeps_its_lease_for_a_while(tmp_path: Path) -> None:
    store = SQLiteLightningStore(tmp_path / "x.db", scan_debounce_seconds=0)
    await store.update_worker("w")
    claimed = await store.start_rollout("x", worker_id="w")
    await store.close()
    again = SQLiteLightningStore(tmp_path / "x.db", scan_debounce_seconds=0)
    rollout = await again.get_rollout_by_id(claimed.rollout_id)
    assert rollout == claimed
    await again.close()
    with pytest.raises(ConflictError, match="closed"):
        await again.enqueue_rollout("x")


async def test_a_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    await SQLiteLightningStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ConflictError, match="schema version 99"):
        SQLiteLightningStore(path)


def test_a_file_that_cannot_be_is_refused_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="no/such/folder"):
        SQLiteLightningStore(tmp_path / "no/such/folder/x.db")
    (tmp_path / "text.db").write_text("this is no database, but a text that is long enough to be read as a header")
    with pytest.raises(BadRequestError, match="not a database"):
        SQLiteLightningStore(tmp_path / "text.db")


async def test_a_store_spec_names_each_store_and_a_bad_one_lists_the_right_ones(tmp_path: Path) -> None:
    assert isinstance(store_from_spec("memory"), InMemoryLightningStore)
    store = store_from_spec(f"sqlite:///{tmp_path}/x.db")
    assert isinstance(store, SQLiteLightningStore)
    assert store_from_spec(store) is store
    await store.close()
    with pytest.raises(BadRequestError, match=r"memory, sqlite:///run\.db"):
        store_from_spec("redis://x")


def test_a_memory_store_says_that_it_cannot_travel() -> None:
    import pickle

    with pytest.raises(TypeError, match="LightningStoreServer"):
        pickle.dumps(InMemoryLightningStore())
