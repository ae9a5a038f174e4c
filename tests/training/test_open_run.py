"""A run is opened once at a time, in a folder of its own, and only as what it was begun as."""

from __future__ import annotations

import asyncio
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from agentlightning.algorithm.fast import Baseline
from agentlightning.errors import BadRequestError
from agentlightning.store import InMemoryLightningStore
from agentlightning.training.records import RunLog
from agentlightning.training.resume import RUN_FILE, OpenRun, open_run
from agentlightning.training.settings import GRPOSettings


@pytest.fixture
async def store() -> InMemoryLightningStore:
    store = InMemoryLightningStore()
    await store.start_run("r")
    return store


async def opened(
    store: InMemoryLightningStore, model: Path, output_dir: Path | None, held: ExitStack, **more: object
) -> OpenRun:
    algorithm = Baseline()
    algorithm.set_store(store)
    algorithm.set_run_log(RunLog(store, "r"))
    folder = None if output_dir is None else str(output_dir)
    settings = GRPOSettings(model=str(model), output_dir=folder)
    return await open_run(algorithm, settings, ["a task"], [], held, **more)


async def errors_of(program: str) -> str:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stderr=asyncio.subprocess.PIPE)
    _, errors = await process.communicate()
    return errors.decode()


async def test_a_run_finds_its_folder_again_from_the_store_alone(
    store: InMemoryLightningStore, untrained_model: Path, tmp_path: Path
) -> None:
    with ExitStack() as held:
        first = await opened(store, untrained_model, tmp_path / "run", held, engine={"kind": "a"})
        assert first.resume.folder is None
        assert (first.folder.path / RUN_FILE).exists()
    with ExitStack() as held:
        again = await opened(store, untrained_model, None, held, engine={"kind": "a"})
        assert again.folder.path == again.resume.folder == first.folder.path


async def test_another_process_is_refused_while_the_run_is_open(
    store: InMemoryLightningStore, untrained_model: Path, tmp_path: Path
) -> None:
    program = f"""
from agentlightning.training.run_folder import held_folder
with held_folder({str(tmp_path / "run")!r}):
    pass
"""
    with ExitStack() as held:
        await opened(store, untrained_model, tmp_path / "run", held)
        assert "BadRequestError: Another process trains in the output folder" in await errors_of(program)
    assert await errors_of(program) == ""


async def test_the_settings_of_another_trainer_are_compared_too(
    store: InMemoryLightningStore, untrained_model: Path, tmp_path: Path
) -> None:
    with ExitStack() as held:
        await opened(store, untrained_model, tmp_path / "run", held, engine={"kind": "a"})
    with (
        ExitStack() as held,
        pytest.raises(BadRequestError, match=r"engine was \{'kind': 'a'\} and is \{'kind': 'b'\}"),
    ):
        await opened(store, untrained_model, tmp_path / "run", held, engine={"kind": "b"})
