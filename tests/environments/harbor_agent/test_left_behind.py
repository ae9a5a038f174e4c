"""What a runner that is killed with SIGKILL leaves on the machine, and what the next one removes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.environments.harbor import trial_folder
from agentlightning.environments.harbor.agent import HarborAgent
from agentlightning.environments.harbor.trial_folder import remove_left_trials
from tests.environments.harbor_agent.tasks import make_task

ROOT = Path(__file__).parents[3]
RUNNER = """
import asyncio, sys
from pathlib import Path
from agentlightning.environments.harbor import trial_folder
from agentlightning.environments.harbor.agent import HarborAgent

trial_folder.BASE = Path(sys.argv[1])
agent = HarborAgent({"import_path": "tests.environments.harbor_agent.agents:Script", "kwargs": {"script": sys.argv[3]}})


async def main():
    with trial_folder.trial_folder("at-1") as folder:
        await agent.run_trial(sys.argv[2], None, folder)


asyncio.run(main())
"""


RECORDED = {"import_path": "tests.environments.harbor_agent.left:Recorded"}


def begun(base: Path) -> bool:
    """Return whether the script of a trial has begun."""
    return bool(list(base.glob("*/*/sandbox-*/root/app/begun")))


def started(base: Path, task: Path, script: str) -> subprocess.Popen[bytes]:
    """Start a runner with a trial, and wait until its script runs."""
    command = [sys.executable, "-c", RUNNER, str(base), str(task), script]
    runner = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    until = time.monotonic() + 60
    while not begun(base):
        assert runner.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    return runner


def running(word: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word in path.read_text():
                return True
        except OSError:
            continue
    return False


def ends(word: str) -> None:
    """Wait until no process with this word in its command runs."""
    until = time.monotonic() + 30
    while running(word):
        assert time.monotonic() < until, f"a process with {word} still runs"
        time.sleep(0.05)


def test_a_killed_runner_leaves_no_process_and_the_next_removes_its_files(
    own_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = started(own_folder, make_task(tmp_path), "touch /app/begun; sleep 4455667")
    runner.kill()
    runner.wait()
    ends("sleep 4455667")
    [left] = trial_folder.parent_folder().iterdir()
    with caplog.at_level(logging.WARNING):
        asyncio.run(remove_left_trials())
    assert not left.exists()
    [record] = [each for each in caplog.records if "left by a runner that has ended" in each.message]
    assert record.args is not None


def test_a_trial_that_runs_is_not_touched(own_folder: Path, tmp_path: Path) -> None:
    runner = started(own_folder, make_task(tmp_path), "touch /app/begun; sleep 4455668")
    try:
        asyncio.run(remove_left_trials())
        assert running("sleep 4455668")
        [running_trial] = trial_folder.parent_folder().iterdir()
        assert running_trial.is_dir()
    finally:
        runner.kill()
        runner.wait()
    ends("sleep 4455668")
    asyncio.run(remove_left_trials())


def test_ctrl_c_ends_the_sandbox_and_removes_its_files(own_folder: Path, tmp_path: Path) -> None:
    runner = started(own_folder, make_task(tmp_path), "touch /app/begun; sleep 4455669")
    runner.send_signal(signal.SIGINT)
    assert runner.wait(60) != 0
    ends("sleep 4455669")
    assert list(trial_folder.parent_folder().iterdir()) == []


@pytest.mark.parametrize("event", ["cancelled", "lost lease"])
def test_the_sandbox_of_an_attempt_that_can_no_longer_count_is_ended(
    event: str, own_folder: Path, tmp_path: Path
) -> None:
    ended: list[tuple[str | None, str | None]] = []

    @agl.algo
    async def once(*, store: agl.LightningStore, train_dataset: agl.Dataset[str]) -> None:
        await store.add_resources({"main_llm": agl.LLM(endpoint="http://127.0.0.1:9/v1", model="policy")})
        queued = await store.enqueue_rollout(train_dataset[0], mode="train")
        until = time.monotonic() + 60
        while not begun(own_folder):
            assert time.monotonic() < until
            await asyncio.sleep(0.05)
        if event == "cancelled":
            await store.update_rollout(queued.rollout_id, status="cancelled")
        else:  # the store gives the rollout to another runner, as it does when no heartbeat arrives
            await store.start_attempt(queued.rollout_id)
        await asyncio.to_thread(ends, "sleep 4455670")
        while (attempt := (await store.query_attempts(queued.rollout_id))[0]).end_time is None:
            assert time.monotonic() < until
            await asyncio.sleep(0.05)
        ended.append((attempt.outcome, attempt.outcome_reason))
        await store.update_rollout(queued.rollout_id, status="cancelled")

    script = "touch /app/begun; sleep 4455670"
    agent = HarborAgent({"import_path": "tests.environments.harbor_agent.agents:Script", "kwargs": {"script": script}})
    runner = {"heartbeat_interval": 0.2, "interval_jitter": 0.0}
    agl.Trainer(algorithm=once, strategy="shm", runner=runner).fit(agent, train_dataset=[str(make_task(tmp_path))])
    assert ended == [("cancelled", "cancelled")]


def test_the_sandbox_of_another_provider_is_ended_by_its_recorded_settings(own_folder: Path, tmp_path: Path) -> None:
    """The environment of the record is one of Harbor's kind that writes down its end."""
    told = tmp_path / "ended"
    environment = {
        "import_path": "tests.environments.harbor_agent.left:Recorded",
        "kwargs": {"told": str(told)},
    }
    task = {"path": str(make_task(tmp_path / "task"))}
    config = {"task": task, "trial_name": "left-1", "environment": environment, "agent": {"name": "nop"}}
    with trial_folder.trial_folder("at-2") as folder:
        folder.record({**config, "trials_dir": str(folder.trials)})
        asyncio.run(remove_left_trials())
        assert not told.exists()  # its runner holds the lock
        kept = folder.path.with_name("kept")
        os.rename(folder.path, kept)
    asyncio.run(remove_left_trials())
    assert told.read_text() == "left-1__env delete=True\nleft-1__verifier__trial delete=True\n"


def test_the_sandbox_of_the_verifier_is_ended_if_that_of_the_agent_is_gone(
    own_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = tmp_path / "ended"
    environment = {**RECORDED, "kwargs": {"told": str(told), "fails": "left-3__env"}}
    task = {"path": str(make_task(tmp_path / "task"))}
    config = {"task": task, "trial_name": "left-3", "environment": environment, "agent": {"name": "nop"}}
    with trial_folder.trial_folder("at-5") as folder:
        folder.record({**config, "trials_dir": str(folder.trials)})
        os.rename(folder.path, folder.path.with_name("kept"))
    with caplog.at_level(logging.ERROR):
        asyncio.run(remove_left_trials())
    assert told.read_text() == "left-3__verifier__trial delete=True\n"
    assert any("not found" in record.message for record in caplog.records)


@pytest.mark.parametrize("cancellations", [1, 2])
def test_a_sandbox_whose_end_was_interrupted_is_ended_by_the_next_attempt(
    cancellations: int, own_folder: Path, tmp_path: Path
) -> None:
    told = tmp_path / "ended"
    environment = {**RECORDED, "kwargs": {"told": str(told), "stop_seconds": 0.5}}
    script = {"import_path": "tests.environments.harbor_agent.agents:Script", "kwargs": {"script": "wait"}}
    agent = HarborAgent(script, environment, verifier="task")

    async def cancelled() -> None:
        with trial_folder.trial_folder("at-6") as folder:
            trial = asyncio.create_task(agent.run_trial(str(make_task(tmp_path / "task")), None, folder))
            until = time.monotonic() + 60
            while not (tmp_path / "ended.waits").exists():
                assert time.monotonic() < until
                await asyncio.sleep(0.05)
            for _ in range(cancellations):
                trial.cancel()
                await asyncio.sleep(0.1)
            with pytest.raises(asyncio.CancelledError):
                await trial

    asyncio.run(cancelled())
    left = list(trial_folder.parent_folder().iterdir())
    assert len(left) == cancellations - 1
    assert told.exists() == (cancellations == 1)
    asyncio.run(remove_left_trials())
    assert "__env delete=True" in told.read_text()


def test_a_sandbox_that_cannot_be_ended_is_named(
    own_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"task": {"path": str(tmp_path / "gone")}, "trial_name": "left-2", "environment": {"type": "daytona"}}
    with trial_folder.trial_folder("at-3") as folder:
        folder.record(config)
        os.rename(folder.path, folder.path.with_name("kept"))
    with caplog.at_level(logging.ERROR):
        asyncio.run(remove_left_trials())
    [text] = [each.message for each in caplog.records if "may still run" in each.message]
    assert "left-2 in the environment daytona" in text


def test_a_folder_whose_runner_was_killed_while_it_was_made_or_removed_goes(own_folder: Path) -> None:
    empty = trial_folder.parent_folder() / "at-4-x"
    (empty / "trials").mkdir(parents=True)
    asyncio.run(remove_left_trials())
    assert not empty.exists()


def test_the_folder_of_another_user_is_refused(own_folder: Path) -> None:
    trial_folder.parent_folder().chmod(0o777)
    with pytest.raises(RuntimeError, match="must be a folder that only its owner"):
        trial_folder.parent_folder()
    trial_folder.BASE.joinpath(f"agl-harbor-{os.geteuid()}").rmdir()
    trial_folder.BASE.joinpath(f"agl-harbor-{os.geteuid()}").symlink_to("/tmp")
    with pytest.raises(RuntimeError, match="must be a folder that only its owner"):
        trial_folder.parent_folder()
    trial_folder.BASE.joinpath(f"agl-harbor-{os.geteuid()}").unlink()
