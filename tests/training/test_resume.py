"""A run is opened by one process at a time, with its settings only, and continues from its store and its folder."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest

from agentlightning.algorithm.fast import Baseline
from agentlightning.errors import BadRequestError
from agentlightning.store import InMemoryLightningStore, cursors
from agentlightning.training.checkpoint import CHECKPOINTS, CheckpointFolder
from agentlightning.training.records import RunLog
from agentlightning.training.resume import (
    RUN_FILE,
    STATE_NAME,
    OpenRun,
    Resumption,
    check_same,
    find_resumption,
    open_run,
    read_run_file,
    write_run_file,
)
from agentlightning.training.settings import GRPOSettings
from agentlightning.types import EnqueueRolloutRequest

_SETTINGS = {"model": "m", "lr_scheduler_type": "constant", "max_steps": 9}
_NOW: dict[str, Any] = {
    **{"run_id": "r", "settings": _SETTINGS, "model_files": "", "tasks": [], "held_out": []},
    "resources": {},
}


@pytest.fixture
async def store() -> InMemoryLightningStore:
    store = InMemoryLightningStore()
    await store.start_run("r")
    return store


def test_a_run_of_an_earlier_version_had_the_defaults_of_settings_that_it_lacked() -> None:
    check_same(_NOW, {**_NOW, "settings": {**_SETTINGS, "curriculum": "none", "shuffle_dataset": True}})
    for name, value, text in (("curriculum", "solve_rate", "'none'"), ("shuffle_dataset", False, "True")):
        with pytest.raises(BadRequestError, match=f"{name} was {text} and is {value!r}"):
            check_same(_NOW, {**_NOW, "settings": {**_SETTINGS, name: value}})


# --- a run is opened -------------------------------------------------------------------------------------------------


async def opened(
    store: InMemoryLightningStore, model: Path, output_dir: Path | None, held: ExitStack, **more: object
) -> OpenRun:
    algorithm = Baseline()
    algorithm.set_store(store)
    algorithm.set_run_log(RunLog(store, "r"))
    folder = None if output_dir is None else str(output_dir)
    settings = GRPOSettings(model=str(model), output_dir=folder)
    return await open_run(algorithm, settings, ["a task"], [], held, **more)


async def test_a_run_finds_its_folder_again_from_the_store_alone_and_compares_the_settings_of_its_trainer(
    store: InMemoryLightningStore, untrained_model: Path, tmp_path: Path
) -> None:
    with ExitStack() as held:
        first = await opened(store, untrained_model, tmp_path / "run", held, engine={"kind": "a"})
        assert first.resume.folder is None
        assert (first.folder.path / RUN_FILE).exists()
    with ExitStack() as held:
        again = await opened(store, untrained_model, None, held, engine={"kind": "a"})
        assert again.folder.path == again.resume.folder == first.folder.path
        with pytest.raises(BadRequestError, match=r"engine was \{'kind': 'a'\} and is \{'kind': 'b'\}"):
            await opened(store, untrained_model, None, held, engine={"kind": "b"})


async def test_another_process_is_refused_while_the_run_is_open(
    store: InMemoryLightningStore, untrained_model: Path, tmp_path: Path
) -> None:
    program = f"""
from agentlightning.training.run_folder import held_folder
with held_folder({str(tmp_path / "run")!r}):
    pass
"""

    async def errors() -> str:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stderr=asyncio.subprocess.PIPE)
        return (await process.communicate())[1].decode()

    with ExitStack() as held:
        await opened(store, untrained_model, tmp_path / "run", held)
        assert "BadRequestError: Another process is training in the output folder" in await errors()
    assert await errors() == ""


def test_the_facts_of_a_run_are_read_for_that_run_only(tmp_path: Path) -> None:
    assert read_run_file(tmp_path, "r") is None
    facts = {**_NOW, "folder": "here"}
    write_run_file(tmp_path, facts)
    assert read_run_file(tmp_path, "r") == facts
    assert read_run_file(tmp_path, "other") is None


@pytest.mark.parametrize("other", [[], "a", {"name": "of another program"}, {"run_id": "r", "state": "succeeded"}])
def test_a_file_of_that_name_by_another_program_is_no_run(tmp_path: Path, other: object) -> None:
    (tmp_path / RUN_FILE).write_text(json.dumps(other))
    assert read_run_file(tmp_path, "r") is None


# --- how it goes on --------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder with a checkpoint after step 3."""
    write_run_file(tmp_path, {**_NOW, "folder": str(tmp_path)})
    facts = {"digest": "d", "weight_version": 3, "state": {}}
    CheckpointFolder(tmp_path / CHECKPOINTS).write(3, lambda place: (place / "w").write_text("x") and None, facts)
    return tmp_path


async def resumption_of(store: InMemoryLightningStore, output_dir: Path | None) -> Resumption:
    with ExitStack() as held:
        return await find_resumption(store, RunLog(store, "r"), _NOW, output_dir, held)


async def test_a_store_that_meets_the_run_for_the_first_time_knows_it_from_then_on(
    store: InMemoryLightningStore, folder: Path
) -> None:
    assert (await resumption_of(store, None)).folder is None
    assert (await resumption_of(store, folder)).steps == 3
    again = await resumption_of(store, None)
    assert (again.steps, again.folder) == (3, folder)
    log = RunLog(store, "r")
    assert (await log.records("state"))[0].name == STATE_NAME
    [point] = await log.records("checkpoint")  # that no store has recorded
    assert (point.step, point.data["path"]) == (3, str(folder / CHECKPOINTS / "checkpoint-3"))


async def test_the_ledgers_of_later_steps_are_read_one_step_at_a_time(
    store: InMemoryLightningStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RunLog(store, "r")
    for step in (4, 5, 6):
        metadata = {"step": step, "task": 0, "sample": 0}
        rollout = await store.start_rollout(input="task", mode="train", run_id="r", metadata=metadata)
        await log.ledger(step, [{"rollout_id": rollout.rollout_id, "calls": []}])
        await log.step(step, {"step": step, "weights": "w"})
    resumption = await resumption_of(store, folder)
    assert sorted(resumption.recorded) == [4, 5, 6]
    queries: list[Any] = []
    read = RunLog.records

    async def records(self: RunLog, *kinds: Any, **bounds: Any) -> Any:
        queries.append((*kinds, *bounds.values()))
        return await read(self, *kinds, **bounds)

    monkeypatch.setattr(RunLog, "records", records)
    assert await resumption.unaccounted(store, ()) == []
    assert queries == [("ledger", step, step) for step in (4, 5, 6)]


async def test_an_old_rollout_that_ends_while_it_is_cancelled_stays_as_it_ended(
    store: InMemoryLightningStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = {"step": 4, "task": 0, "sample": 0}
    begun = await store.start_rollout(input="task", mode="train", run_id="r", metadata=metadata)
    resumption = await resumption_of(store, folder)
    read = store.get_rollout_by_id

    async def read_before_its_end(rollout_id: str) -> Any:
        rollout = await read(rollout_id)
        await store.update_attempt(rollout_id, begun.attempt.attempt_id, status="succeeded")
        return rollout

    monkeypatch.setattr(store, "get_rollout_by_id", read_before_its_end)
    assert await resumption.unaccounted(store, ()) == []
    ended = await read(begun.rollout_id)
    assert ended is not None
    assert ended.status == "succeeded"


async def test_only_the_rollouts_after_the_checkpoint_are_read(
    store: InMemoryLightningStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cursors, "PAGE", 4)
    for step in (1, 2, 3, 4, 5):
        places = [{"step": step, "task": task, "sample": 0} for task in range(6)]
        await store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input="t", mode="train", run_id="r", metadata=place) for place in places]
        )
    pages: list[int] = []
    query = store.query_rollouts

    async def counted(**filters: Any) -> Any:
        page = await query(**filters)
        if "sort_by" in filters:
            pages.append(len(page))
        return page

    monkeypatch.setattr(store, "query_rollouts", counted)
    resumption = await resumption_of(store, folder)
    places = sorted((about["step"], about["task"]) for about in (r.metadata or {} for r in resumption._old))
    assert places == [(step, task) for step in (4, 5) for task in range(6)]
    assert pages == [4, 4, 4, 4]  # of the 30; the last one holds rollouts of the checkpoint's step


@pytest.mark.parametrize(
    ("schedule", "depends"),
    [
        ({}, False),
        ({"lr_scheduler_type": "cosine"}, True),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3}, False),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.5}, True),
        ({"policies": {"a": {"lr_scheduler_type": "linear"}, "b": {}}}, True),
        ({"policies": {"a": {"learning_rate": 0.1}, "b": {}}}, False),
    ],
    ids=str,
)
def test_the_length_of_a_run_may_change_unless_a_schedule_depends_on_it(
    schedule: dict[str, Any], depends: bool
) -> None:
    begun, longer = ({**_NOW, "settings": {**_SETTINGS, **schedule, "max_steps": steps}} for steps in (9, 12))
    with pytest.raises(BadRequestError, match="max_steps was 9 and is 12") if depends else nullcontext():
        check_same(begun, longer)
