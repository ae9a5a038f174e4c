"""The display of a run: a table while it runs on a terminal, one line at its end, nothing without a viewer."""

from __future__ import annotations

import asyncio
import logging
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.trainer.follow import RunReport, followed, quantile
from agentlightning.types import RolloutEvent
from tests.trainer.parts import run_tasks, tenth

PROGRAM = """
import agentlightning as agl
from agentlightning.types import EnqueueRolloutRequest

@agl.algo
async def algorithm(*, store, train_dataset):
    await store.add_resources({})
    made = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=task) for task in train_dataset])
    await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in made])

def agent(task):
    if task == 3:
        raise KeyError(task)
    return task / 2

if __name__ == "__main__":
    trainer = agl.Trainer(algorithm=algorithm, strategy={"type": "cs", "server_port": 0})
    trainer.fit(agent, train_dataset=[1, 2, 3])
    print("done")
"""


def test_a_terminal_shows_the_run_and_what_it_came_to(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    leader, follower = pty.openpty()
    command = [sys.executable, str(tmp_path / "program.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=follower) as running:
        os.close(follower)
        shown = read_all(leader)
        assert running.stdout is not None
        assert running.stdout.read() == b"done\n"
    assert shown.count("\x1b[1A") <= 1, "only its own line is drawn over: runners write to the same terminal"
    assert "raise KeyError(task)" in shown
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    last = last[last.rindex("run run-") :]
    assert "3 ended, 0 running, 0 waiting" in last
    assert re.search(r"scored\s+2\s*\r", last)
    assert re.search(r"infrastructure_fault\s+1\s*\r", last)
    assert "mean reward 0.750 (of 2)" in last
    assert "memory, until this program ends" in last


def read_all(leader: int) -> str:
    """Return what was written to a terminal until its other side was closed."""
    output = b""
    while True:
        try:
            more = os.read(leader, 65536)
        except OSError:  # so says Linux when nobody holds the other side
            more = b""
        if not more:
            os.close(leader)
            return output.decode()
        output += more


def test_where_no_terminal_is_nothing_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    agl.Trainer(algorithm=run_tasks, strategy="shm").fit(tenth, train_dataset=[1])
    assert capfd.readouterr() == ("", "")


def test_plain_progress_is_one_line_at_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    agl.Trainer(algorithm=run_tasks, strategy="shm", progress="plain").fit(tenth, train_dataset=[1, 3])
    shown = capfd.readouterr()
    assert re.match(r"run run-\w+: 2 rollouts in [\d.]+ s \(2 scored\); mean reward 0.200 .*\n\Z", shown.err)
    assert shown.out == ""


@pytest.mark.parametrize("strategy", ["shm", {"type": "cs", "server_port": 0}])
def test_the_log_sums_up_every_algorithms_run(strategy: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "agentlightning"):
        agl.Trainer(algorithm=run_tasks, strategy=strategy, store=f"sqlite:///{tmp_path}/run.db", run_id="mine").fit(
            tenth, train_dataset=[1, 2, 3, 4]
        )
    [line] = [r.getMessage() for r in caplog.records if r.name == "agentlightning.trainer.follow"]
    assert re.match(
        r"run mine: 4 rollouts in [\d.]+ s \(4 scored\); mean reward 0.250 \(of 4\); from queue to end", line
    )
    assert line.endswith(f"; kept in sqlite:///{tmp_path}/run.db")


def test_what_the_algorithm_raises_is_summed_up_too(caplog: pytest.LogCaptureFixture) -> None:
    @agl.algo
    async def broken(*, store: agl.LightningStore) -> None:
        await store.add_resources({})
        await store.wait_for_rollout((await store.enqueue_rollout(1)).rollout_id)
        raise OverflowError("too much")

    with caplog.at_level(logging.INFO, "agentlightning"), pytest.raises(OverflowError):
        agl.Trainer(algorithm=broken, strategy="shm").fit(tenth)
    assert "1 rollout in" in caplog.text


async def test_what_ends_before_the_first_question_for_changes_is_answered_is_counted() -> None:
    class Reticent(agl.InMemoryLightningStore):
        async def query_events(self, *args: Any, timeout: float = 0.0, **kwargs: Any) -> Any:
            if timeout:
                await asyncio.Event().wait()
            return await super().query_events(*args, **kwargs)

    async def ended(task: int) -> None:
        rollout = await store.start_rollout(task)
        await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")

    report, store = RunReport("run a", "memory"), Reticent()
    await ended(1)
    async with followed(report, store, "plain", live=False):
        await ended(2)
        await ended(3)
    assert len(report.ended) == 2, "the one before the body is not of this start"


def test_a_store_that_tells_of_no_changes_is_no_hindrance(caplog: pytest.LogCaptureFixture) -> None:
    class Silent(agl.InMemoryLightningStore):
        query_events = agl.LightningStore.query_events

    with caplog.at_level(logging.INFO, "agentlightning"):
        agl.Trainer(algorithm=run_tasks, strategy="shm", store=Silent()).fit(tenth, train_dataset=[1, 3])
    assert "2 rollouts in" in caplog.text
    assert "(2 scored); mean reward 0.200 (of 2)" in caplog.text


# --- the report ------------------------------------------------------------------------------------------------------


def event(rollout_id: str, status: str, outcome: str | None = None, end: float | None = None) -> RolloutEvent:
    unknown = dict.fromkeys(("run_id", "mode", "attempt_id", "attempt_status", "worker_id"))
    about = {"rollout_id": rollout_id, "status": status, "outcome": outcome, "end_time": end}
    return RolloutEvent.model_validate({**unknown, **about, "spans": 0, "start_time": 10.0})


def test_the_last_word_on_a_rollout_counts() -> None:
    report = RunReport("run a", "memory")
    assert report.line(0.0) == "run a: 0 rollouts in 0.0 s; no reward; kept in memory"
    report.note(event("1", "queuing"), None)
    report.note(event("2", "running"), None)
    assert (report.waiting, report.running) == (1, 1)
    report.note(event("1", "failed", "infrastructure_fault", 11.0), None)
    report.note(event("1", "requeuing"), None)
    assert (len(report.ended), report.waiting) == (0, 1)
    report.note(event("1", "succeeded", "scored", 14.0), 0.5)
    report.note(event("2", "cancelled", None, 12.0), None)
    assert report.outcomes == {"scored": 1, "not run": 1}
    assert report.line(3.0) == (
        "run a: 2 rollouts in 3.0 s (1 not run, 1 scored); mean reward 0.500 (of 1); from queue to end: median "
        "2.00 s, 90% within 4.00 s, longest 4.00 s; kept in memory"
    )


def test_quantiles_are_values_that_were_seen() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0]
    assert [quantile(values, share) for share in (0.0, 0.1, 0.5, 0.9, 1.0)] == [1.0, 1.0, 5.0, 9.0, 10.0]
