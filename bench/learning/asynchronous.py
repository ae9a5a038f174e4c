"""Synchronous and asynchronous collection (`max_staleness=1`) on the demo: speed in alternating short runs, and the
results of whole runs.

Two agents: the demo's own, with a tool that answers at once, so that engine, agents and learner always compete for the
processor; and the same with a tool that waits without using the CPU, as a remote search or test suite does: 0.05 s, and
1 s in one of ten rollouts. Other work on the machine changes its speed, so the result is the median of ratios of
successive runs, which alternate in order.
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
    """Run the demo's agent with a slow tool."""
    reward = calc_agent(task, llm)
    time.sleep(1.0 if random.random() < 0.1 else 0.05)
    return reward


AGENTS: Final[dict[str, Callable[..., float]]] = {"demo": calc_agent, "slow tool": slow_tool}


@dataclass(frozen=True)
class Learned:
    """The result of a whole run of the demo."""

    accuracy: float
    """Share of held-out tasks solved at the end, sampled."""
    staleness: float
    """Mean age of the trained calls, in weight versions."""
    seconds: float
    """Seconds of training."""


def compare_speed(agent: str, *, seed: int = 0) -> list[tuple[float, float]]:
    """Return rollouts per second, synchronous and asynchronous, pair by pair."""
    pairs: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = _warm(Path(folder), seed)
        for number in range(PAIRS):
            rates: dict[int, float] = {}
            for staleness in (0, 1) if number % 2 == 0 else (1, 0):
                place = Path(folder) / f"{number}-{staleness}"
                result = _run(AGENTS[agent], model, place, seed, staleness, steps=SPEED_STEPS)
                rollouts = SPEED_STEPS * settings.BATCH_SIZE * settings.NUM_GENERATIONS
                rates[staleness] = rollouts / result.train_seconds
            pairs.append((rates[0], rates[1]))
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
