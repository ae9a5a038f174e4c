"""A run whose processes are all killed, ten times at ten points, and started again each time, is one run in the end."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from tests.algorithm.parts import calls_of, rollouts_of
from tests.training.resumed import RUN_ID, STEPS

_POINTS = (
    *("rollouts 1", "update 1", "ledger 2", "record 2", "files 2", "checkpoint 2"),
    *("evaluation 3", "metrics 4", "rollouts 5", "end 0"),
)
_CURVE = ("step", "mean_reward", "held_out", "calls_captured", "calls_trained", "update", "weights")


def play(model: Path, folder: Path, *point: str) -> int:
    command = [sys.executable, "-m", "tests.training.resumed", str(model), str(folder), *point]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, start_new_session=True)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.heavy
@pytest.mark.timeout(900)
async def test_a_run_that_is_killed_at_ten_points_has_the_curve_and_the_ledger_of_one_run(
    untrained_model: Path, tmp_path: Path
) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for folder in (killed, whole):
        folder.mkdir()
    for point in _POINTS:
        assert play(untrained_model, killed, point) == -signal.SIGKILL, point
    assert play(untrained_model, killed) == 0
    assert play(untrained_model, whole) == 0

    lines = lines_of(killed)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert _chosen(lines, _CURVE[:3] + _CURVE[4:]) == _chosen(lines_of(whole), _CURVE[:3] + _CURVE[4:])

    store = agl.SQLiteLightningStore(killed / "store.db")
    run = await store.get_run_by_id(RUN_ID)
    assert run is not None
    assert (run.state, run.starts, run.last_step) == ("succeeded", len(_POINTS) + 1, STEPS)
    records = await store.query_run_records(RUN_ID, kind_in=["step"])
    assert [record.step for record in records] == [1, 2, 3, 4, 5, 6]
    assert _chosen([record.data for record in records], _CURVE) == _chosen(lines, _CURVE)

    calls = {call.ref for call in await calls_of(store, await rollouts_of(store))}
    entries = Counter[tuple[str, str, str]]()
    trained = Counter[int]()
    for record in await store.query_run_records(RUN_ID, kind_in=["ledger"]):
        for call in record.data["calls"]:
            entries[record.name, call["attempt_id"], call["call_id"]] += 1
            trained[record.step] += call["ending"] == "trained"
    assert set(entries) == calls
    assert max(entries.values()) == 1
    assert {record.step: record.data["calls_trained"] for record in records} == {s: trained[s] for s in range(1, 7)}

    found = await store.query_run_records(RUN_ID, kind_in=["evaluation"])
    await store.close()
    other = agl.SQLiteLightningStore(whole / "store.db")
    expected = await other.query_run_records(RUN_ID, kind_in=["evaluation"])
    await other.close()
    assert [(e.step, e.name, e.data["rewards"]) for e in found] == [
        (e.step, e.name, e.data["rewards"]) for e in expected
    ]


@pytest.mark.heavy
async def test_a_run_whose_stored_rewards_are_too_large_goes_on_without_them(
    untrained_model: Path, tmp_path: Path
) -> None:
    """As an older version has left it."""
    assert play(untrained_model, tmp_path, "update 1") == -signal.SIGKILL
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as db:
        query = "SELECT rollout_id FROM summaries WHERE mode = 'train' ORDER BY number LIMIT 2"
        ids = [row[0] for row in db.execute(query)]
        for rollout_id, value in zip(ids, (1e308, -1e308), strict=True):
            db.execute("UPDATE summaries SET reward = ? WHERE rollout_id = ?", (value, rollout_id))
            for table in ("rollouts", "spans"):
                query = f"SELECT number, body FROM {table} WHERE rollout_id = ?"
                for number, body in db.execute(query, (rollout_id,)).fetchall():
                    worse = re.sub(rb'("reward":|"primary":|\.value":)[\d.]+', rb"\g<1>%b" % repr(value).encode(), body)
                    db.execute(f"UPDATE {table} SET body = ? WHERE number = ?", (worse, number))
    assert play(untrained_model, tmp_path) == 0
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert lines_of(tmp_path)[0]["calls_excluded"] == {"no_reward": 4}
    store = agl.SQLiteLightningStore(tmp_path / "store.db")
    ledger = await store.query_run_records(RUN_ID, kind_in=["ledger"], step_to=1)
    await store.close()
    reasons = {record.name: {call["reason"] for call in record.data["calls"]} for record in ledger}
    assert {name for name, found in reasons.items() if "no_reward" in found} == set(ids)


def _chosen(lines: list[dict[str, Any]], names: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{name: line[name] for name in names} for line in lines]
