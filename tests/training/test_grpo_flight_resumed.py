"""A run with groups in flight whose processes are all killed goes on: nothing is lost and nothing is trained twice."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.training.replay import replay
from agentlightning.types import AttemptedRollout
from tests.algorithm.parts import calls_of, fit, metrics_of, rollouts_of, two_turns
from tests.training.resumed import RUN_ID, STEPS
from tests.training.test_grpo_flight import TASKS, books, place_of

_POINTS = (
    *("rollouts 1", "update 1", "ledger 2", "record 2", "checkpoint 2"),
    *("evaluation 3", "rollouts 4", "metrics 5", "update 6"),
)


def play(model: Path, folder: Path, *point: str) -> int:
    command = [sys.executable, "-m", "tests.training.resumed", str(model), str(folder), *point]
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


def run_named(agent: Any, model: Path, folder: Path, **settings: Any) -> Any:
    """Run under one name with a store of its own connection."""
    settings = {"max_steps": 5, "max_staleness": 1, "save_steps": 2, **settings}
    store = agl.SQLiteLightningStore(folder / "store.db")
    return fit(agent, TASKS, store=store, model=model, output_dir=folder / "run", trainer_run_id="named", **settings)


async def adds_up(folder: Path) -> list[dict[str, Any]]:
    """Check that each call of the run's training rollouts is in its ledger once; return how each ended."""
    store = agl.SQLiteLightningStore(folder / "store.db")
    entries, endings = await books(store, "named")
    rollouts = await rollouts_of(store)
    assert {call.ref for call in await calls_of(store, rollouts)} == set(entries)
    assert max(entries.values()) == 1
    assert all(rollout.status in ("succeeded", "failed", "cancelled") for rollout in rollouts)
    records = await store.query_run_records("named", kind_in=["step"])
    taken = Counter(tuple(key) for record in records for key in record.data["flight"]["taken"])
    assert set(taken.values()) == {1}
    await store.close()
    return endings


@agl.rollout
def sends_a_signal_once(task: str, llm: agl.LLM, rollout: AttemptedRollout) -> float:
    """Ends the run while groups of its third step are in flight."""
    reward = two_turns(task, llm)
    if place_of(rollout)[0] == 3 and (number := os.environ.pop("AGL_TEST_SIGNAL", None)):
        os.kill(os.getpid(), int(number))
    return reward + rollout.start_time % 1


@pytest.mark.heavy
@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_cancels_what_is_in_flight_and_the_run_goes_on_later(
    untrained_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    raised: type[BaseException],
) -> None:
    monkeypatch.setenv("AGL_TEST_SIGNAL", str(int(number)))
    with pytest.raises(raised):
        run_named(sends_a_signal_once, untrained_model, tmp_path)

    async def still_open() -> list[str]:
        store = agl.SQLiteLightningStore(tmp_path / "store.db")
        rollouts = await rollouts_of(store)
        await store.close()
        return [rollout.status for rollout in rollouts if rollout.status not in ("succeeded", "failed", "cancelled")]

    assert asyncio.run(still_open()) == []
    result = run_named(sends_a_signal_once, untrained_model, tmp_path)
    assert [line["step"] for line in metrics_of(result)] == [1, 2, 3, 4, 5]
    asyncio.run(adds_up(tmp_path))


@pytest.mark.heavy
def test_a_run_whose_weights_come_out_otherwise_takes_the_later_steps_anew(
    untrained_model: Path, tmp_path: Path
) -> None:
    """As on a GPU: here the record of the second step is changed, and the newest checkpoints are broken."""
    settings = {"max_steps": 4, "save_steps": 1, "save_total_limit": None}
    run_named(two_turns, untrained_model, tmp_path, **settings)
    for step in (2, 3, 4):
        (tmp_path / "run" / "checkpoints" / f"checkpoint-{step}" / "model.safetensors").unlink()

    async def change() -> None:
        opened = agl.SQLiteLightningStore(tmp_path / "store.db")
        records = list(await opened.query_run_records("named", step_from=2))
        await opened.rewind_run("named", 1)
        for record in records:
            if (record.kind, record.step) == ("step", 2):
                record.data["weights"] = "of another machine"
        await opened.add_run_records("named", records)
        await opened.close()

    asyncio.run(change())
    result = run_named(two_turns, untrained_model, tmp_path, **settings)
    assert [line["step"] for line in metrics_of(result)] == [1, 2, 3, 4]
    endings = asyncio.run(adds_up(tmp_path))
    assert sum(call["reason"] == "step_undone" for call in endings) >= 8 * 2


def test_how_far_sampling_may_be_ahead_is_of_the_run(untrained_model: Path, tmp_path: Path) -> None:
    run_named(two_turns, untrained_model, tmp_path, max_steps=1)
    with pytest.raises(agl.BadRequestError, match="max_staleness was 1 and is 2"):
        run_named(two_turns, untrained_model, tmp_path, max_steps=2, max_staleness=2)


def test_a_run_that_has_ended_goes_on_for_more_steps(untrained_model: Path, tmp_path: Path) -> None:
    run_named(two_turns, untrained_model, tmp_path, max_steps=2)
    result = run_named(two_turns, untrained_model, tmp_path, max_steps=4)
    assert [line["step"] for line in metrics_of(result)] == [1, 2, 3, 4]
    asyncio.run(adds_up(tmp_path))
