"""A run with groups in flight whose processes are all killed goes on: nothing is lost and nothing is trained twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.algorithm.grpo.checkpoint.replay import replay
from tests.algorithm.parts import calls_of, rollouts_of
from tests.algorithm.resumed import RUN_ID, STEPS

_POINTS = ("rollouts 1", "rollouts 2", "update 2", "ledger 3", "checkpoint 4", "metrics 5", "record 5", "update 6")


def play(model: Path, folder: Path, *point: str) -> int:
    command = [sys.executable, "-m", "tests.algorithm.resumed", str(model), str(folder), *point]
    environment = {**os.environ, "MAX_STALENESS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, start_new_session=True, env=environment
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


@pytest.mark.heavy
@pytest.mark.timeout(900)
async def test_a_run_that_is_killed_with_groups_in_flight_loses_none_and_trains_none_twice(
    untrained_model: Path, tmp_path: Path
) -> None:
    for point in _POINTS:
        assert play(untrained_model, tmp_path, point) == -signal.SIGKILL, point
    assert play(untrained_model, tmp_path) == 0

    store = agl.SQLiteLightningStore(tmp_path / "store.db")
    run = await store.get_run_by_id(RUN_ID)
    assert run is not None
    assert (run.state, run.starts, run.last_step) == ("succeeded", len(_POINTS) + 1, STEPS)
    records = await store.query_run_records(RUN_ID, kind_in=["step"])
    assert [record.step for record in records] == list(range(1, STEPS + 1))
    taken = Counter(tuple(key) for record in records for key in record.data["flight"]["taken"])
    assert set(taken.values()) == {1}
    assert len({key[:2] for key in taken}) == 2 * STEPS

    entries, trained = Counter[tuple[str, str, str]](), Counter[int]()
    for record in await store.query_run_records(RUN_ID, kind_in=["ledger"]):
        for call in record.data["calls"]:
            entries[record.name, call["attempt_id"], call["call_id"]] += 1
            trained[record.step] += call["ending"] == "trained"
    rollouts = await rollouts_of(store)
    assert {call.ref for call in await calls_of(store, rollouts)} == set(entries)
    assert max(entries.values()) == 1
    assert {record.step: record.data["calls_trained"] for record in records} == {
        step: trained[step] for step in range(1, STEPS + 1)
    }
    assert {rollout.status for rollout in rollouts} <= {"succeeded", "cancelled", "failed"}
    assert (await replay(store, RUN_ID, STEPS)).differences == []
    await store.close()
