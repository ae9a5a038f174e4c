"""Where a run that is started again goes on, told by its store and its folder."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from agentlightning.store import InMemoryLightningStore, read_operations
from agentlightning.training.checkpoint import CHECKPOINTS, CheckpointFolder
from agentlightning.training.records import RunLog
from agentlightning.training.resume import STATE_NAME, Resumption, find_resumption, write_run_file
from agentlightning.types import EnqueueRolloutRequest

_SETTINGS = {"model": "m", "lr_scheduler_type": "constant", "max_steps": 9}
_NOW: dict[str, Any] = {
    **{"run_id": "r", "settings": _SETTINGS, "model_files": "", "tasks": [], "held_out": []},
    "resources": {},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder with a checkpoint after step 3."""
    write_run_file(tmp_path, {**_NOW, "folder": str(tmp_path)})
    facts = {"digest": "d", "weight_version": 3, "state": {}}
    CheckpointFolder(tmp_path / CHECKPOINTS).write(3, lambda place: (place / "w").write_text("x") and None, facts)
    return tmp_path


async def found_in(store: InMemoryLightningStore, output_dir: Path | None) -> Resumption:
    await store.start_run("r")
    with ExitStack() as held:
        return await find_resumption(store, RunLog(store, "r"), _NOW, output_dir, held)


async def test_a_store_that_meets_the_run_for_the_first_time_knows_it_from_then_on(folder: Path) -> None:
    store = InMemoryLightningStore()
    assert (await found_in(store, None)).folder is None
    assert (await found_in(store, folder)).steps == 3
    again = await found_in(store, None)
    assert (again.steps, again.folder) == (3, folder)
    log = RunLog(store, "r")
    assert (await log.records("state"))[0].name == STATE_NAME
    [point] = await log.records("checkpoint")  # that no store has recorded
    assert (point.step, point.data["path"]) == (3, str(folder / CHECKPOINTS / "checkpoint-3"))


async def test_the_ledgers_of_later_steps_are_read_one_step_at_a_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = InMemoryLightningStore()
    await store.start_run("r")
    log = RunLog(store, "r")
    for step in (4, 5, 6):
        rollout = await store.start_rollout(
            input="task", mode="train", run_id="r", metadata={"step": step, "task": 0, "sample": 0}
        )
        await log.ledger(step, [{"rollout_id": rollout.rollout_id, "calls": []}])
        await log.step(step, {"step": step, "weights": "w"})
    resumption = await found_in(store, folder)
    assert sorted(resumption.recorded) == [4, 5, 6]
    asked: list[Any] = []
    read = RunLog.records

    async def records(self: RunLog, *kinds: Any, **bounds: Any) -> Any:
        asked.append((*kinds, *bounds.values()))
        return await read(self, *kinds, **bounds)

    monkeypatch.setattr(RunLog, "records", records)
    assert await resumption.unaccounted(store, ()) == []
    assert asked == [("ledger", step, step) for step in (4, 5, 6)]


async def test_an_old_rollout_that_ends_while_it_is_cancelled_stays_as_it_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = InMemoryLightningStore()
    await store.start_run("r")
    begun = await store.start_rollout(
        input="task", mode="train", run_id="r", metadata={"step": 4, "task": 0, "sample": 0}
    )
    resumption = await found_in(store, folder)
    read = store.get_rollout_by_id

    async def read_before_its_end(rollout_id: str) -> Any:
        found = await read(rollout_id)
        await store.update_attempt(rollout_id, begun.attempt.attempt_id, status="succeeded")
        return found

    monkeypatch.setattr(store, "get_rollout_by_id", read_before_its_end)
    assert await resumption.unaccounted(store, ()) == []
    ended = await read(begun.rollout_id)
    assert ended is not None
    assert ended.status == "succeeded"


async def test_only_the_rollouts_after_the_checkpoint_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_operations, "PAGE", 4)
    store = InMemoryLightningStore()
    await store.start_run("r")
    for step in (1, 2, 3, 4, 5):
        await store.enqueue_many_rollouts(
            [
                EnqueueRolloutRequest(
                    input="t", mode="train", run_id="r", metadata={"step": step, "task": n, "sample": 0}
                )
                for n in range(6)
            ]
        )
    pages: list[int] = []
    query = store.query_rollouts

    async def counted(**filters: Any) -> Any:
        page = await query(**filters)
        if "sort_by" in filters:
            pages.append(len(page))
        return page

    monkeypatch.setattr(store, "query_rollouts", counted)
    resumption = await found_in(store, folder)
    places = sorted((about["step"], about["task"]) for about in (r.metadata or {} for r in resumption._old))
    assert places == [(step, task) for step in (4, 5) for task in range(6)]
    assert pages == [4, 4, 4, 4]  # of the 30; the last one holds rollouts of the checkpoint's step
