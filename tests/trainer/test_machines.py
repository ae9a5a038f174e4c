"""What happens between processes that share nothing but an address, and when one of them is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.store import LightningStore
from agentlightning.types import Dataset
from tests.stubs.ports import free_port

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os
import agentlightning as agl
from tests.trainer.parts import run_tasks, tenth
trainer = agl.Trainer(algorithm=run_tasks, max_rollouts=int(os.environ.get("MAX_ROLLOUTS", 2)), n_runners=2)
trainer.fit(tenth, train_dataset=[1, 2, 3, 4])
print(trainer.strategy.role, trainer.result)
"""


def start(role: str, port: int, **environment: str) -> subprocess.Popen[str]:
    environment |= {"AGL_CURRENT_ROLE": role, "AGL_SERVER_HOST": "127.0.0.1", "AGL_SERVER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.mark.parametrize("environment", [pytest.param({}, marks=pytest.mark.heavy), {"AGL_RUN_ID": "run-7"}])
def test_one_program_takes_both_roles_by_its_environment(port: int, environment: dict[str, str]) -> None:
    algorithm = start("algorithm", port, **environment)
    runners = start("runner", port, **environment)
    said, heard = algorithm.communicate(timeout=60)[0], runners.communicate(timeout=60)[0]
    assert said.startswith("algorithm [('succeeded'"), said
    assert said.count("succeeded") == 4
    assert heard.endswith("runner None\n"), heard
    assert (algorithm.returncode, runners.returncode) == (0, 0)


@pytest.mark.heavy
def test_a_rollout_in_the_hands_of_a_killed_runner_goes_to_another_attempt(tmp_path: Path) -> None:
    mark = tmp_path / "killed"

    @agl.rollout
    def agent(task: int) -> float:
        agl.emit_annotation({"task": task})
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    @agl.algo
    async def algorithm(*, store: LightningStore, train_dataset: Dataset[int]) -> list[Any]:
        await store.add_resources({})
        while sum(worker.last_heartbeat_time is not None for worker in await store.query_workers()) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # both runners are at work
        rollout = await store.enqueue_rollout(train_dataset[0])
        [done] = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=30)
        rewards = agl.find_reward_spans(list(await store.query_spans(rollout.rollout_id)))
        attempts = await store.query_attempts(rollout.rollout_id)
        return [done.status, [attempt.status for attempt in attempts], len(rewards)]

    trainer = agl.Trainer(
        algorithm=algorithm,
        store=agl.InMemoryLightningStore(lease_seconds=1.0, scan_debounce_seconds=0.1),
        runner={"heartbeat_interval": 0.2, "interval_jitter": 0.0},
        strategy={"type": "cs", "server_port": 0},
        n_runners=2,
    )
    trainer.fit(agent, train_dataset=[5])
    assert trainer.result == ["succeeded", ["failed", "succeeded"], 1]


def test_two_runs_on_one_store_do_not_see_each_other(tmp_path: Path) -> None:
    async def served() -> list[list[Any]]:
        server = agl.LightningStoreServer(agl.InMemoryLightningStore(), "127.0.0.1", 0)
        await server.start()
        try:
            return await asyncio.gather(*(asyncio.to_thread(run, server.endpoint, sign) for sign in (1, -1)))
        finally:
            await server.stop()

    def run(endpoint: str, sign: int) -> list[Any]:
        @agl.algo
        async def algorithm(*, store: LightningStore, train_dataset: Dataset[int]) -> list[Any]:
            try:
                await store.add_resources({})
                rollouts = [await store.enqueue_rollout(task) for task in train_dataset]
                ids = [rollout.rollout_id for rollout in rollouts]
                await store.wait_for_rollouts(rollout_ids=ids, timeout=30)
                return [agl.find_final_reward(list(await store.query_spans(rollout_id))) for rollout_id in ids]
            finally:
                await client.close()

        def agent(task: int) -> float:
            return float(sign * task)

        client = agl.LightningStoreClient(endpoint)
        strategy = {"type": "cs", "managed_store": False}
        trainer = agl.Trainer(algorithm=algorithm, store=client, strategy=strategy)
        trainer.fit(agent, train_dataset=list(range(1, 9)))
        return trainer.result

    one, other = asyncio.run(served())
    assert one == [float(task) for task in range(1, 9)]
    assert other == [-reward for reward in one]
