"""A checkpoint exists whole or not at all, whatever interrupts its writing, and a broken one is detected."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.store import InMemoryLightningStore
from agentlightning.training.checkpoint import (
    BrokenCheckpointError,
    CheckpointFolder,
    CheckpointWriter,
    CompletedStep,
    read_checkpoint,
)
from agentlightning.training.learner.policy import Policy
from agentlightning.training.records import RunLog
from agentlightning.training.settings import GRPOSettings
from agentlightning.training.updater import Learner, Updater
from tests.training.test_run_folder import full_disk

_WRITER = """
import sys, time
from pathlib import Path
from agentlightning.training.checkpoint import CheckpointFolder

def fill(folder):
    (folder / "weights").write_bytes(b"x" * 1000)
    print("half", flush=True)
    time.sleep(60)

CheckpointFolder(sys.argv[1]).write(2, fill, {})
"""


def fill(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "weights").write_text(text)
        (folder / "part").mkdir()
        (folder / "part" / "more").write_text(text * 2)

    return write


def test_what_was_written_is_read_with_its_facts(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    assert folder.last_good() is None
    written = folder.write(3, fill("abc"), {"digest": "d"})
    assert folder.last_good() == written == read_checkpoint(tmp_path / "checkpoints" / "checkpoint-3")
    assert (written.path / "part" / "more").read_text() == "abcabc"
    assert written.facts == {"digest": "d"}
    assert oct((written.path / "weights").stat().st_mode & 0o777) == "0o600"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: os.truncate(path / "weights", 1), "weights has 1 bytes instead of 3"),
        (lambda path: (path / "weights").write_text("abd"), "the content of weights has changed"),
        (lambda path: (path / "part" / "more").unlink(), "part/more is missing"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda path: os.truncate(path / "manifest.json", 20), "manifest.json"),
    ],
)
def test_a_broken_one_is_named_and_the_one_before_it_is_used(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    folder = CheckpointFolder(tmp_path)
    good = folder.write(1, fill("abc"), {})
    broken = folder.write(2, fill("abc"), {})
    damage(broken.path)
    with pytest.raises(BrokenCheckpointError, match=message):
        read_checkpoint(broken.path)
    assert folder.last_good() == good
    assert folder.last_good(before=1) is None


def test_a_later_format_is_refused_by_its_number(tmp_path: Path) -> None:
    written = CheckpointFolder(tmp_path).write(1, fill("abc"), {})
    manifest = written.path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 7'))
    with pytest.raises(agl.BadRequestError, match="format 7"):
        read_checkpoint(written.path)
    with pytest.raises(agl.BadRequestError, match="not a folder"):
        read_checkpoint(tmp_path / "nowhere")


def interrupted(path: Path) -> None:
    (path / "weights").write_text("half")
    raise KeyboardInterrupt


def too_large(path: Path) -> None:
    with full_disk(10_000):
        (path / "weights").write_bytes(b"x" * 20_000)


@pytest.mark.parametrize(("fails", "error"), [(interrupted, KeyboardInterrupt), (too_large, OSError)])
@pytest.mark.parametrize("step", [1, 2])
def test_a_writer_that_fails_leaves_what_was_there(
    tmp_path: Path, fails: Callable[[Path], None], error: type[BaseException], step: int
) -> None:
    folder = CheckpointFolder(tmp_path, limit=1)
    good = folder.write(1, fill("abc"), {})
    with pytest.raises(error):
        folder.write(step, fails, {})
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert folder.last_good() == good


def test_a_writer_that_is_killed_leaves_what_was_there(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    good = folder.write(1, fill("abc"), {})
    with subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"half\n"
        os.kill(writer.pid, signal.SIGKILL)
    assert len(list(tmp_path.iterdir())) == 2
    assert folder.last_good() == good
    folder.tidy()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    shutil.move(good.path, tmp_path / ".replaced-1")  # as if it was killed between its two renamings
    folder.tidy()
    assert folder.last_good() == good


def test_whoever_looks_for_the_last_good_one_leaves_alone_what_is_being_written(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    good = folder.write(1, fill("abc"), {})

    def look_meanwhile(path: Path) -> None:
        assert CheckpointFolder(tmp_path).last_good() == good
        fill("def")(path)
        assert CheckpointFolder(tmp_path).last_good() == good

    assert folder.write(2, look_meanwhile, {}) == folder.last_good()


def test_so_many_of_the_newest_are_kept_up_to_the_one_just_written(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, limit=2)
    for step in (1, 2, 3, 10):
        folder.write(step, fill(str(step)), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-3"]
    (tmp_path / "checkpoint-10" / "weights").unlink()
    written = folder.write(7, fill("abc"), {})
    assert folder.last_good() == written
    folder.write(8, fill("abc"), {})
    assert folder.steps() == [7, 8, 10], "later ones, which are broken, do not count"


async def test_a_checkpoint_during_which_the_run_was_interrupted_is_recorded(
    model_folder: Path, tmp_path: Path
) -> None:
    store, begun, may_end = InMemoryLightningStore(), asyncio.Event(), threading.Event()
    await store.start_run("r")
    loop = asyncio.get_running_loop()

    class Slow(Updater):
        def save_checkpoint(self, folder: Path, step: int) -> None:
            (folder / "weights").write_text("x")
            loop.call_soon_threadsafe(begun.set)
            assert may_end.wait(30)

    policy, log = Policy.load(model_folder), RunLog(store, "r")
    updater = Slow([Learner(None, GRPOSettings(model=str(model_folder), save_steps=1), policy)])
    writer = CheckpointWriter(folder=CheckpointFolder(tmp_path), updater=updater, log=log, run_facts={})
    completed = CompletedStep(1, policy.weight_version, "digest", dict)
    step = asyncio.create_task(writer.step_done(completed, pytest.fail))
    await begun.wait()
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    may_end.set()
    await writer.end(completed)
    assert [record.step for record in await log.records("checkpoint")] == [1]
