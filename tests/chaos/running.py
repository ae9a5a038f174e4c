"""A whole run under fire: runners are killed again and again, the store server a few times; then all is counted.

A Trainer with `cs` runs tasks of which the outcome is known: most earn their number, some raise. A second process
serves the store (SQLite). This one kills a runner with `kill -9` every two seconds and, at even distances, the server,
which is started again on the same port and file. At the end the file is read: each task must be there once, at its end,
with the outcome that it was bound to have, its reward once, and no attempt open.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import agentlightning as agl
from agentlightning.adapter.spans.tokens import is_stale
from agentlightning.store import LightningStore, LightningStoreClient
from agentlightning.types import AttemptedRollout, Dataset, EnqueueRolloutRequest, RolloutConfig
from tests.chaos.processes import StoreProcess
from tests.chaos.stores import open_store
from tests.stubs.processes import Process

ROOT = Path(__file__).parents[2]
LEASE_SECONDS = 2.0
LIMIT_SECONDS = 120.0
"""Seconds without progress after which the run has failed."""
BATCH = 500
EACH_FAILS = 10
"""Every tenth task raises."""


# --- the run ---------------------------------------------------------------------------------------------------------


@agl.rollout
async def agent(task: int) -> float:
    """Earn the task's number; one in ten raises."""
    agl.emit_annotation({"task": task})
    await asyncio.sleep(0.005)
    if task % EACH_FAILS == EACH_FAILS - 1:
        raise LookupError(f"no answer to {task}")
    return float(task)


@agl.algo
async def run_tasks(*, store: LightningStore, train_dataset: Dataset[int]) -> dict[str, int]:
    """Run every task, a batch at a time; returns how many rollouts ended in which status."""
    await store.add_resources({})
    config = RolloutConfig(infrastructure_retries=20)
    ends: Counter[str] = Counter()
    for start in range(0, len(train_dataset), BATCH):
        tasks = range(start, min(start + BATCH, len(train_dataset)))
        requests = [EnqueueRolloutRequest(input=train_dataset[i], config=config) for i in tasks]
        ids = [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]
        ends.update(rollout.status for rollout in await store.wait_for_rollouts(rollout_ids=ids))
    return dict(ends)


def train(endpoint: str, rollouts: int, runners: int) -> None:
    """Run to the end and print what the algorithm saw."""
    logging.basicConfig(level=logging.CRITICAL)  # every tenth task raises, and each would be told
    trainer = agl.Trainer(
        algorithm=run_tasks,
        store=LightningStoreClient(endpoint, deadline=60.0),
        strategy={"type": "cs", "managed_store": False, "max_runner_restarts": 10_000},
        runner={"heartbeat_interval": 0.3, "interval_jitter": 0.0},
        n_runners=runners,
    )
    trainer.fit(agent, train_dataset=list(range(rollouts)))
    print(json.dumps(trainer.result), flush=True)


# --- the fire --------------------------------------------------------------------------------------------------------


@dataclass
class Losses:
    """Counts of the injected failures."""

    runners: int = 0
    servers: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list[str])


def program_of(endpoint: str, *, rollouts: int, runners: int, folder: Path) -> Process:
    """Start the run against a store server."""
    command = ["python", "-m", "tests.chaos.running", endpoint, str(rollouts), str(runners)]
    return Process(command, ROOT, {}, log=folder / "run.log")


def under_fire(rollouts: int, runners: int, *, server_kills: int, pause: float, seed: int, folder: Path) -> Losses:
    """Go through the run while killing, then read the file; what is wrong is in `problems`."""
    keeper = StoreProcess(f"sqlite:///{folder}/store.db", lease_seconds=LEASE_SECONDS)
    keeper.start()
    losses, began = Losses(), time.monotonic()
    program = program_of(keeper.endpoint, rollouts=rollouts, runners=runners, folder=folder)
    try:
        _shoot(program, keeper, losses, rollouts, server_kills, pause, random.Random(seed))
        code = program.ended(LIMIT_SECONDS)
        losses.seconds = time.monotonic() - began
        if code != 0:
            losses.problems.append(f"the run ended with exit code {code}: {program.said[-2000:]}")
            return losses
        counts = json.loads(program.said.splitlines()[-1])
    finally:
        program.kill()
        keeper.kill()
    losses.problems += asyncio.run(count(keeper.spec, rollouts, counts))
    return losses


def _shoot(
    program: Process,
    keeper: StoreProcess,
    losses: Losses,
    rollouts: int,
    server_kills: int,
    pause: float,
    chance: random.Random,
) -> None:
    """Kill a runner every `pause` seconds until the program has ended, and the server a few times on the way.

    A runner is killed only if another rollout was done since the last kill, or all are.
    """
    done, moved = -1, time.monotonic()
    while program.code is None:
        time.sleep(pause)
        now_done = asyncio.run(_done(keeper))
        if now_done > done or now_done == rollouts:  # else a slow machine would never get to work
            losses.runners += _kill_a_runner(program.popen.pid, chance)
        if now_done > done:
            done, moved = now_done, time.monotonic()
        elif time.monotonic() - moved > LIMIT_SECONDS:
            raise TimeoutError(f"no progress for {LIMIT_SECONDS:g} s at {done} of {rollouts} rollouts")
        if losses.servers < server_kills and done * (server_kills + 1) >= rollouts * (losses.servers + 1):
            keeper.kill()
            losses.servers += 1
            keeper.start()
        print(f"{done} done, {losses.runners} runners and {losses.servers} servers killed", flush=True)


def _kill_a_runner(pid: int, chance: random.Random) -> int:
    """Kill one of the processes that the fork server has forked; 0 if there is none."""
    with contextlib.suppress(psutil.NoSuchProcess):
        processes = [p for child in psutil.Process(pid).children() for p in child.children()]
        if processes:
            chance.choice(processes).kill()
            return 1
    return 0


async def _done(keeper: StoreProcess) -> int:
    client = LightningStoreClient(keeper.endpoint, deadline=60.0)
    try:
        page = await client.query_rollouts(status_in=["succeeded", "failed"], limit=1)
    finally:
        await client.close()
    return page.total


# --- the count -------------------------------------------------------------------------------------------------------


async def count(spec: str, rollouts: int, counts: dict[str, int]) -> list[str]:
    """Read the file and return its problems."""
    failing = len(range(EACH_FAILS - 1, rollouts, EACH_FAILS))
    expected = {"succeeded": rollouts - failing, "failed": failing}
    problems = (
        [] if counts == {k: v for k, v in expected.items() if v} else [f"the algorithm saw {counts}, not {expected}"]
    )
    store = open_store(spec)
    try:
        stored_rollouts: list[Any] = list(await store.query_rollouts())
        times = Counter(rollout.input for rollout in stored_rollouts)
        problems += [f"task {task} is there {times[task]} times" for task in range(rollouts) if times[task] != 1]
        for rollout in stored_rollouts:
            problems += await _judge(store, rollout)
    finally:
        await store.close()
    return problems


async def _judge(store: LightningStore, rollout: AttemptedRollout) -> list[str]:
    raises = rollout.input % EACH_FAILS == EACH_FAILS - 1
    attempts = await store.query_attempts(rollout.rollout_id)
    last = attempts[-1]
    ended = ("failed", "infrastructure_fault") if raises else ("succeeded", "scored")
    problems: list[str] = []
    if (rollout.status, last.outcome) != ended or last.status != ended[0]:
        problems.append(f"task {rollout.input} ended as {rollout.status}, {last.status}, {last.outcome}, not {ended}")
    early = [a.outcome_reason for a in attempts[:-1] if a.outcome_reason not in ("lease_expired", "runner_died")]
    if early:
        problems.append(f"task {rollout.input} has attempts before the last one that ended as {early}")
    spans = [s for s in await store.query_spans(rollout.rollout_id, last.attempt_id) if not is_stale(s)]
    rewards = [agl.get_reward_value(span) for span in agl.find_reward_spans(spans)]
    if rewards != ([] if raises else [float(rollout.input)]):
        problems.append(f"task {rollout.input} has the rewards {rewards} on its last attempt")
    return problems


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
