"""The check of a file looks at runs and their records, too."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from agentlightning.errors import DamagedRecordError
from agentlightning.store.check import check_file
from agentlightning.store.sqlite import SQLiteLightningStore
from agentlightning.types import RunRecord


async def test_damaged_and_stray_records_of_runs_are_listed_with_their_removal(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    store = SQLiteLightningStore(path)
    for run_id in ("r", "gone"):
        await store.start_run(run_id)
        await store.add_run_records(run_id, [RunRecord(kind="step", step=step) for step in (1, 2, 3)])
    await store.enqueue_rollout("x")
    assert check_file(path).problems == []
    with sqlite3.connect(path) as db:
        db.execute("UPDATE run_records SET body = '{' WHERE run_id = 'r' AND step = 1")
        db.execute("UPDATE run_records SET step = 7 WHERE run_id = 'r' AND step = 2")
        db.execute("DELETE FROM rows WHERE kind = 'run' AND key = 'gone'")
    stray, unreadable, elsewhere = check_file(path).problems
    assert stray == "3 records of run 'gone', which does not exist"
    assert unreadable.startswith("run 'r': the step record '' of step 1 cannot be read. Remove it: DELETE FROM")
    assert "step 7 is stored under a different kind, step or name" in elsewhere
    with pytest.raises(DamagedRecordError, match="of run 'r'"):
        await store.query_run_records("r", step_to=1)
    assert (await store.query_run_records("r", step_from=3))[0].step == 3
    with sqlite3.connect(path) as db:
        db.execute(unreadable.partition("Remove it: ")[2])
    assert (await store.query_run_records("r", step_to=1)).total == 0
    await store.close()
