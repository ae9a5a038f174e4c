"""Synchronous against asynchronous collection (`max_staleness=1`) on the demo: speed in short runs in turn, and what
whole runs learn.

Two agents: the demo's own, whose tool answers at once, so that engine, agents and learner want the processor all the
time; and the same with a tool that takes its time without any work, as a search or a test suite elsewhere does: 0.05 s,
and one of ten rollouts a second. A machine that does other work besides is as fast as it is left alone, so speed is
the median of ratios of runs that follow each other, which of the two is first alternating.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import agentlightning as agl
from agentlightning.demo import settings
from agentlightning.demo.agent import calc_agent
from agentlightning.demo.imitation import make_policy
from agentlightning.demo.tasks import Task, make_tasks
from agentlightning.training.result import GRPOResult
from bench.demo_grpo import demo_grpo

SPEED_STEPS: Final = 6
PAIRS: Final = 5


def slow_tool(task: Task, llm: agl.LLM) -> float:
    """The demo's agent with a tool that takes its time."""
    reward = calc_agent(task, llm)
    time.sleep(1.0 if random.random() < 0.1 else 0.05)
    return reward


AGENTS: Final[dict[str, Callable[..., float]]] = {"demo": calc_agent, "slow tool": slow_tool}


@dataclass(frozen=True)
class Learned:
    """What a whole run of the demo gave."""

    accuracy: float
    """Of the held-out tasks at the end, sampled."""
    staleness: float
    """Mean age of the trained calls, in weight versions."""
    seconds: float
    """Of training."""


def compare_speed(agent: str, *, seed: int = 0) -> list[tuple[float, float]]:
    """Return rollouts per second, synchronous and asynchronous, pair by pair."""
    pairs: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = _warm(Path(folder), seed)
        for number in range(PAIRS):
            found: dict[int, float] = {}
            for staleness in (0, 1) if number % 2 == 0 else (1, 0):
                place = Path(folder) / f"{number}-{staleness}"
                result = _run(AGENTS[agent], model, place, seed, staleness, steps=SPEED_STEPS)
                rollouts = SPEED_STEPS * settings.BATCH_SIZE * settings.NUM_GENERATIONS
                found[staleness] = rollouts / result.train_seconds
            pairs.append((found[0], found[1]))
    return pairs


def ratio_of(pairs: list[tuple[float, float]]) -> float:
    """Return the median of the ratios of asynchronous to synchronous."""
    return statistics.median(ahead / synchronous for synchronous, ahead in pairs)


def learn(seed: int, staleness: int) -> Learned:
    """Train the demo as it is."""
    with tempfile.TemporaryDirectory() as folder:
        model = _warm(Path(folder), seed)
        result = _run(calc_agent, model, Path(folder) / "run", seed, staleness, steps=settings.STEPS, measures=True)
    last = result.evaluation("sampled", last=True)
    assert last is not None
    age = statistics.fmean(figures.versions_behind or 0.0 for figures in result.metrics)
    return Learned(last.accuracy, age, result.train_seconds)


def _warm(folder: Path, seed: int) -> Path:
    train, held_out = make_tasks(seed)
    make_policy(folder / "model", [*train, *held_out], seed=seed)
    return folder / "model"


def _run(
    agent: Callable[..., float],
    model: Path,
    folder: Path,
    seed: int,
    staleness: int,
    *,
    steps: int,
    measures: bool = False,
) -> GRPOResult:
    train, held_out = make_tasks(seed)
    store = agl.SQLiteLightningStore(folder.with_suffix(".db"))
    trainer = agl.Trainer(
        algorithm=demo_grpo(
            model=model,
            max_steps=steps,
            lr_scheduler_type="linear",
            minibatch_rollouts=settings.MINIBATCH_ROLLOUTS,
            temperature=settings.TEMPERATURE,
            seed=seed,
            output_dir=folder,
            max_staleness=staleness,
        ),
        runner={"concurrency": settings.CONCURRENCY},
        store=store,
        strategy=agl.ClientServerExecutionStrategy(n_runners=2, server_port=0),
    )
    data: Any = held_out if measures else None
    try:
        trainer.fit(agent, train_dataset=train, val_dataset=data)
    finally:
        asyncio.run(store.close())
    return trainer.result
