"""Acknowledged writes survive a kill. Aborted scripts: `test_faults.py`; racing claims: `tests/chaos/test_races.py`."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from agentlightning.errors import BadRequestError, ConflictError
from agentlightning.store.sqlite import SQLiteLightningStore

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
    assert len(asyncio.run(store.dequeue_many_rollouts(limit=1000))) == len(stored_ids)
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


def test_a_file_that_cannot_be_is_refused_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="no/such/folder"):
        SQLiteLightningStore(tmp_path / "no/such/folder/x.db")
    (tmp_path / "text.db").write_text("this is no database, but a text that is long enough to be read as a header")
    with pytest.raises(BadRequestError, match="not a database"):
        SQLiteLightningStore(tmp_path / "text.db")
