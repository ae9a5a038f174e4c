"""A runner that dies in the middle of a rollout, in any way, fails that attempt and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.execution.children import ChildExit
from agentlightning.execution.team import end_attempts
from agentlightning.runner.base import worker_label
from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.store.client_server import LightningStoreClient, LightningStoreServer
from agentlightning.types import Attempt, Dataset
from tests.execution.fit_parts import enqueue

LIMIT_SECONDS = 60
DEATHS = {"exit 0": 0, "exit 3": 3, "SIGTERM": -signal.SIGTERM, "SIGKILL": -signal.SIGKILL, "SIGSEGV": -signal.SIGSEGV}
CRASHED = ("failed", "infrastructure_fault", "runner_died")


def _die(how: str) -> None:
    code = DEATHS[how]
    if code >= 0:
        os._exit(code)
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None  # pytest has a handler for SIGSEGV
    os.kill(os.getpid(), -code)


@agl.rollout
async def dies_of_its_task(task: str) -> float:
    """Dies in the way that the task names; returns from any other task."""
    if task in DEATHS:
        _die(task)
        await asyncio.Event().wait()  # a signal takes its time
    return 1.0


seen: list[list[Attempt]] = []
"""The attempts of each task of the last fit."""


@agl.algo
async def notes_attempts(*, store: LightningStore, train_dataset: Dataset[Any]) -> None:
    """Run every task, and note the attempts of each."""
    ids = await enqueue(store, train_dataset)
    await store.wait_for_rollouts(rollout_ids=ids, timeout=LIMIT_SECONDS)
    seen[:] = [list(await store.query_attempts(rollout_id)) for rollout_id in ids]


def _attempts_of(tasks: list[str], isolation: str = "thread", **settings: Any) -> list[list[tuple[Any, ...]]]:
    """Fit, and return status, outcome and reason of each attempt of each task."""
    strategy: Any = {"type": "cs", "server_port": 0, **settings}
    runner: Any = agl.LitAgentRunner(agl.OtelTracer(), isolation=isolation)
    trainer = agl.Trainer(algorithm=notes_attempts, strategy=strategy, runner=runner)
    trainer.fit(dies_of_its_task, train_dataset=tasks)
    return [[(a.status, a.outcome, a.outcome_reason) for a in attempts] for attempts in seen]


@pytest.mark.parametrize("how", DEATHS)
def test_a_task_that_kills_its_runner_ends_after_its_retries_and_the_others_go_on(how: str) -> None:
    first, *others = _attempts_of([how, "a", "b", "c"])
    assert first == [CRASHED] * 4  # one, and three infrastructure retries
    assert others == [[("succeeded", "scored", None)]] * 3


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("how", "isolation", "settings"),
    [
        ("SIGSEGV", "process", {}),
        ("SIGKILL", "thread", {"n_runners": 2}),
        ("exit 0", "thread", {"start_method": "spawn"}),
    ],
)
def test_so_it_is_wherever_the_agent_is_run(how: str, isolation: str, settings: dict[str, Any]) -> None:
    first, other = _attempts_of([how, "a"], isolation, **settings)
    assert first == [CRASHED] * 4
    assert other == [("succeeded", "scored", None)]


def test_a_run_in_which_every_task_kills_its_runner_ends() -> None:
    with pytest.raises(agl.errors.RunnerDiedError, match="max_runner_restarts=2"):
        _attempts_of(["exit 0", "exit 3", "exit 0", "exit 3"], max_runner_restarts=2)


def test_a_runner_without_restarts_that_leaves_with_work_in_hand_is_an_error() -> None:
    with pytest.raises(agl.errors.RunnerDiedError, match="runner-0"):
        _attempts_of(["exit 0"], max_runner_restarts=0)


@pytest.mark.parametrize("over_http", [False, True])
async def test_what_a_dead_worker_had_in_hand_is_queued_again_and_what_had_ended_stays(over_http: bool) -> None:
    memory = InMemoryLightningStore()
    server = LightningStoreServer(memory, port=0) if over_http else None
    if server is not None:
        await server.start()
    store: LightningStore = memory if server is None else LightningStoreClient(server.endpoint)
    exit_ = ChildExit(0, "runner-0", 0, None, pid=4242)
    assert exit_.worker_id is not None
    try:
        claims = [await _claimed(store, exit_.worker_id) for _ in range(3)]
        other = await _claimed(store, worker_label("elsewhere", 4242, 0))
        done = claims.pop()
        await store.update_attempt(done.rollout_id, done.attempt.attempt_id, status="succeeded", outcome="scored")

        assert await end_attempts(store, {exit_.worker_id}, exit_.describe()) == {claim.rollout_id for claim in claims}
        assert await end_attempts(store, {exit_.worker_id}, exit_.describe()) == frozenset()

        for claim in claims:
            rollout = await store.get_rollout_by_id(claim.rollout_id)
            (attempt,) = await store.query_attempts(claim.rollout_id)
            assert rollout is not None
            assert rollout.status == "requeuing"
            assert (attempt.status, attempt.outcome, attempt.outcome_reason) == CRASHED
            assert attempt.error is not None
            assert "runner-0 (exitcode=0)" in attempt.error.message
        for claim, status in ((done, "succeeded"), (other, "preparing")):
            (attempt,) = await store.query_attempts(claim.rollout_id)
            assert attempt.status == status
    finally:
        if server is not None:
            await store.close()
            await server.stop()
        await memory.close()


async def _claimed(store: LightningStore, worker_id: str) -> Any:
    await store.enqueue_rollout(input="x")
    claim = await store.dequeue_rollout(worker_id=worker_id)
    assert claim is not None
    return claim
