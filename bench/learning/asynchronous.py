"""Synchronous against asynchronous collection (`max_staleness=1`) on the demo, pair by pair: speed and final accuracy.

Two agents: the demo's own, whose tool answers at once, so that engine, agents and learner want the processor all the
time; and the same with a tool that takes its time without any work, as a search or a test suite elsewhere does: most
calls 0.05 s, one of ten a second. Within a pair both begin with the same weights; which goes first alternates.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
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

STEPS: Final = settings.STEPS
STALENESS: Final = (0, 1)


@dataclass(frozen=True)
class Side:
    """What one run of a pair gave."""

    rollouts_per_second: float
    """Of training, evaluations left out."""
    accuracy: float
    """Of the held-out tasks at the end, sampled."""
    waited: float
    """Share of the training time that the loop waited for rollouts."""
    staleness: float
    """Mean age of the trained calls, in weight versions."""
    dropped: int
    """Groups that were too stale."""


def slow_tool(task: Task, llm: agl.LLM) -> float:
    """The demo's agent with a tool that takes its time."""
    reward = calc_agent(task, llm)
    time.sleep(1.0 if random.random() < 0.1 else 0.05)
    return reward


AGENTS: Final[dict[str, Callable[..., float]]] = {"demo": calc_agent, "slow tool": slow_tool}


def compare(folder: Path, seed: int, agent: str) -> tuple[Side, Side]:
    """Return the synchronous and the asynchronous side of a pair; which of them runs first alternates with the seed."""
    train, held_out = make_tasks(seed)
    model = folder / "model"
    if not model.exists():
        make_policy(model, [*train, *held_out], seed=seed)
    sides: dict[int, Side] = {}
    for staleness in STALENESS if seed % 2 == 0 else STALENESS[::-1]:
        place = folder / f"{agent.replace(' ', '-')}-{staleness}"
        sides[staleness] = _side(AGENTS[agent], model, place, seed, train, held_out, staleness)
    return sides[0], sides[1]


def _side(
    agent: Callable[..., float], model: Path, folder: Path, seed: int, train: Any, held_out: Any, staleness: int
) -> Side:
    trainer = agl.Trainer(
        algorithm=agl.GRPO(
            model=model,
            max_steps=STEPS,
            num_generations=settings.NUM_GENERATIONS,
            batch_size=settings.BATCH_SIZE,
            learning_rate=settings.LEARNING_RATE,
            lr_scheduler_type="linear",
            num_iterations=settings.NUM_ITERATIONS,
            minibatch_rollouts=settings.MINIBATCH_ROLLOUTS,
            epsilon=settings.EPSILON,
            epsilon_high=settings.EPSILON_HIGH,
            temperature=settings.TEMPERATURE,
            max_completion_length=settings.MAX_COMPLETION_LENGTH,
            seed=seed,
            output_dir=folder,
            progress="none",
            max_staleness=staleness,
        ),
        runner={"concurrency": settings.CONCURRENCY},
        store=agl.SQLiteLightningStore(folder.with_suffix(".db")),
        strategy=agl.ClientServerExecutionStrategy(n_runners=2, server_port=0),
    )
    trainer.fit(agent, train_dataset=train, val_dataset=held_out)
    result = trainer.result
    last = result.evaluation("sampled", last=True)
    assert last is not None
    seconds = result.train_seconds
    flights = [figures.flight for figures in result.metrics]
    waited = [figures.seconds["generate"] + figures.seconds["wait"] for figures in result.metrics]
    if staleness:
        waited = [flight["waited_seconds"] for flight in flights]
    return Side(
        rollouts_per_second=STEPS * settings.BATCH_SIZE * settings.NUM_GENERATIONS / seconds,
        accuracy=last.accuracy,
        waited=sum(waited) / seconds,
        staleness=statistics.fmean(figures.versions_behind or 0.0 for figures in result.metrics),
        dropped=sum(flight.get("dropped_groups", 0) for flight in flights),
    )


def lines(name: str, seed: int, pair: tuple[Side, Side]) -> list[str]:
    """Return the two lines of a pair."""
    ratio = pair[1].rollouts_per_second / pair[0].rollouts_per_second
    found: list[str] = []
    for staleness, side in zip(STALENESS, pair, strict=True):
        figures = dataclasses.astuple(side)
        text = "{:>7.1f} {:>8.1%} {:>7.0%} {:>6.2f} {:>4d}".format(*figures)
        found.append(f"{name:>9} {seed:>5} {staleness:>4} {text}{f'   {ratio:.2f} times' if staleness else ''}")
    return found
