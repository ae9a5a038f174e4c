"""A checkpoint that was written is among the run's records, whatever ends the run meanwhile."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from agentlightning.training.checkpoint.keeper import AfterStep, CheckpointKeeper
from agentlightning.training.policies.learners import Learners

from agentlightning.store import InMemoryLightningStore
from agentlightning.training.checkpoint import CheckpointFolder
from agentlightning.training.checkpoint import keeper as module
from agentlightning.training.learner.policy import Policy
from agentlightning.training.runs.log import RunLog
from agentlightning.training.settings import GRPOSettings
from agentlightning.training.updater import Learner


async def test_a_checkpoint_during_which_the_run_was_interrupted_is_recorded(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, begun, may_end = InMemoryLightningStore(), asyncio.Event(), threading.Event()
    await store.start_run("r")
    loop = asyncio.get_running_loop()

    def write_slowly(learners: Learners, folder: Path) -> None:
        (folder / "weights").write_text("x")
        loop.call_soon_threadsafe(begun.set)
        assert may_end.wait(30)

    monkeypatch.setattr(module, "save_policies", write_slowly)
    policy = Policy.load(model_folder)
    folder, log = CheckpointFolder(tmp_path), RunLog(store, "r")
    learners = Learners([Learner(None, GRPOSettings(model=str(model_folder)), policy)])
    keeper = CheckpointKeeper(folder=folder, learners=learners, log=log, run_facts={}, every=1)
    after = AfterStep(1, policy.weight_version, "digest", dict)
    step = asyncio.create_task(keeper.step_done(after, pytest.fail))
    await begun.wait()
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    may_end.set()
    await keeper.end(after)
    assert [record.step for record in await log.records("checkpoint")] == [1]
