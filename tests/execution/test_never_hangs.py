"""A fit always ends: the causes of hangs in the older system, in threads and in processes, for every start method.

The numbers are those of the contract's list of weaknesses. Ctrl+C (9) is in `test_endings.py`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import RunnerDiedError
from tests.execution import fit_parts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(30)]

LAYOUTS: dict[str, dict[str, Any]] = {
    "shm": {"type": "shm", "graceful_delay": 0.3},
    "cs-fork": {"type": "cs", "start_method": "fork"},
    "cs-spawn": {"type": "cs", "start_method": "spawn"},
    "cs-forkserver": {"type": "cs", "start_method": "forkserver"},
}
PROCESSES: dict[str, Any] = {"server_port": 0, "graceful_timeout": 1.0, "terminate_timeout": 5.0}
RARE = ("cs-spawn", "cs-forkserver")
"""These take seconds to start: the whole table is for `make test-heavy`."""

each_layout = pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.heavy) if name in RARE else name for name in LAYOUTS]
)
each_number = pytest.mark.parametrize("n_runners", [1, 2])


def trainer(layout: str, algorithm: Any, n_runners: int = 1, **settings: Any) -> agl.Trainer:
    strategy = {**LAYOUTS[layout], **({} if layout == "shm" else PROCESSES), **settings.pop("strategy", {})}
    return agl.Trainer(algorithm=algorithm, n_runners=n_runners, strategy=strategy, **settings)


@each_layout
@each_number
def test_1_the_end_of_the_algorithm_ends_the_fit_whoever_has_the_main_thread(layout: str, n_runners: int) -> None:
    made = trainer(layout, fit_parts.runs_tasks, n_runners)
    made.fit(fit_parts.echo, train_dataset=[1, 2, 3])
    assert [reward for _, reward, _, _ in made.result] == [1.0, 2.0, 3.0]


@each_layout
def test_1_so_it_does_with_the_runner_in_the_main_process(layout: str, tmp_path: Path) -> None:
    side: dict[str, Any] = {"main_thread": "runner"} if layout == "shm" else {"main_process": "runner"}
    made = trainer(layout, fit_parts.runs_tasks, strategy=side, store=f"sqlite:///{tmp_path}/run.db")
    made.fit(fit_parts.echo, train_dataset=[1])
    assert [reward for _, reward, _, _ in made.result] == [1.0]


@each_layout
def test_2_and_8_runners_share_nothing_and_have_names_of_their_own(layout: str) -> None:
    made = trainer(layout, fit_parts.runs_tasks, 2, runner={"concurrency": 4})
    made.fit(fit_parts.echo, train_dataset=list(range(24)))
    assert [reward for _, reward, _, _ in made.result] == [float(task) for task in range(24)]
    assert all(own == [True] for _, _, own, _ in made.result)
    workers = {worker for _, _, _, worker in made.result}
    assert {worker[-2:] for worker in workers} <= {"-0", "-1"}
    if layout != "shm":
        assert len({worker.rsplit("-", 1)[0] for worker in workers}) == len(workers)


@each_layout
def test_3_a_runner_that_crashes_ends_the_fit_with_its_cause(layout: str) -> None:
    if layout == "shm":
        with pytest.raises(LookupError, match="the runner found nothing"):
            trainer(layout, fit_parts.runs_tasks, runner=fit_parts.BrokenRunner).fit(fit_parts.echo, train_dataset=[1])
        return
    made = trainer(layout, fit_parts.runs_tasks, strategy={"max_runner_restarts": 0})
    with pytest.raises(RunnerDiedError, match=r"runner-0 \(exitcode=3\)"):
        made.fit(fit_parts.kills_its_process, train_dataset=[1])
    made = trainer(layout, fit_parts.runs_tasks, strategy={"max_runner_restarts": 0}, runner=fit_parts.BrokenRunner)
    with pytest.raises(RunnerDiedError, match="LookupError: the runner found nothing"):
        made.fit(fit_parts.echo, train_dataset=[1])


@each_layout
def test_3_so_does_an_algorithm_that_raises_and_its_error_is_the_one_shown(layout: str) -> None:
    with pytest.raises(TimeoutError, match="the algorithm gave up"):
        trainer(layout, fit_parts.raises_meanwhile).fit(fit_parts.hangs, train_dataset=[1])


@each_layout
def test_4_missing_resources_fail_the_attempt_with_a_reason(layout: str) -> None:
    made = trainer(layout, fit_parts.misses_its_resources)
    made.fit(fit_parts.echo, train_dataset=[1])
    [[status, outcome, reason]] = made.result
    assert (status, outcome) == ("failed", "infrastructure_fault")
    assert reason


@each_layout
@each_number
def test_5_runners_at_their_limit_end_the_fit_when_work_is_left(layout: str, n_runners: int) -> None:
    made = trainer(layout, fit_parts.misses_its_resources, n_runners, max_rollouts=1)
    made.fit(fit_parts.echo, train_dataset=list(range(n_runners + 2)))
    assert len(made.result) == n_runners  # the other two have no attempt


@each_layout
def test_6_what_is_broken_off_is_never_told_as_a_success(layout: str, tmp_path: Path) -> None:
    made = trainer(layout, fit_parts.leaves_them_at_work, store=agl.InMemoryLightningStore())
    made.fit(fit_parts.hangs_once_begun, train_dataset=[f"{tmp_path}/begun"])
    [rollout_id] = made.result
    attempt = asyncio.run(made.store.get_latest_attempt(rollout_id))
    assert attempt is not None
    assert (attempt.status, attempt.outcome) == ("failed", "cancelled")


@each_layout
def test_6_nor_does_it_run_for_ever_in_the_store_when_its_runner_had_to_be_killed(layout: str, tmp_path: Path) -> None:
    if layout == "shm":
        pytest.skip("an agent that stops its process stops the whole run")
    short = {"graceful_timeout": 0.2, "terminate_timeout": 0.2}
    made = trainer(layout, fit_parts.leaves_them_stopped, store=agl.InMemoryLightningStore(), strategy=short)
    with pytest.raises(RunnerDiedError, match="SIGKILL"):
        made.fit(fit_parts.stops_its_process, train_dataset=[f"{tmp_path}/begun"])
    [rollout] = asyncio.run(made.store.query_rollouts())
    assert isinstance(rollout, agl.AttemptedRollout)
    assert (rollout.attempt.status, rollout.attempt.outcome) == ("failed", "cancelled")
    assert rollout.attempt.outcome_reason == "stopped"


@each_layout
def test_an_agent_that_raises_ends_its_rollout_and_not_the_run(layout: str) -> None:
    made = trainer(layout, fit_parts.runs_tasks)
    made.fit(fit_parts.fails, train_dataset=[1, 2])
    assert [status for status, *_ in made.result] == ["failed", "failed"]
