"""`curriculum="solve_rate"` against passes over the tasks, with an equal number of rollouts, on two sets of tasks.

`mixed`: five of six tasks of the demo are replaced by tasks that every reply or no reply solves, as far too easy or far
too hard ones. `equal`: all tasks are of the demo, and none is easier than another in a way that a curriculum could use.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import agentlightning as agl
from agentlightning.demo import settings
from agentlightning.demo.agent import calc_agent
from agentlightning.demo.imitation import make_policy
from agentlightning.demo.tasks import make_tasks
from agentlightning.evaluation.statistics import Interval, interval_of
from bench.demo_grpo import demo_grpo

TaskSet = Literal["mixed", "equal"]
SETS: Final[tuple[TaskSet, ...]] = ("mixed", "equal")
TASKS, HELD_OUT, STEPS, BATCH_SIZE = 48, 128, 16, 8
_USEFUL_EVERY: Final = 6


@dataclass(frozen=True)
class Pair:
    """Results of one seed without and with the curriculum."""

    held_out: tuple[float, float]
    """Share of held-out tasks solved at the end, sampled."""
    useful: tuple[int, int]
    """Number of groups with different rewards, of `STEPS` times `BATCH_SIZE`."""


@agl.rollout
def answer(task: dict[str, Any], llm: agl.LLM) -> float:
    """Run the agent of the demo; a task with a `fixed` reward earns it with any reply."""
    reward = calc_agent(task, llm)
    return reward if task["fixed"] is None else task["fixed"]


def compare(seed: int) -> dict[TaskSet, Pair]:
    """Train on each set twice, from the same model."""
    train, held_out = make_tasks(seed, train=TASKS, held_out=HELD_OUT)
    validation = [{**task, "fixed": None} for task in held_out]
    pairs: dict[TaskSet, Pair] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_policy(folder / "model", [*train, *held_out], seed=seed)
        for task_set in SETS:
            useful = 1 if task_set == "equal" else _USEFUL_EVERY
            tasks = [{**task, "fixed": None if n % useful == 0 else float(n % 2)} for n, task in enumerate(train)]
            plain = _run(folder, seed, tasks, validation, "none")
            drawn = _run(folder, seed, tasks, validation, "solve_rate")
            pairs[task_set] = Pair((plain[0], drawn[0]), (plain[1], drawn[1]))
    return pairs


def difference(pairs: Sequence[Pair]) -> Interval:
    """Return the mean difference of the held-out shares, with its 95 % interval over the seeds (Student's t)."""
    interval = interval_of(
        [with_it - without for without, with_it in (pair.held_out for pair in pairs)], method="student"
    )
    assert interval is not None
    return interval


def _run(folder: Path, seed: int, tasks: list[Any], validation: list[Any], curriculum: str) -> tuple[float, int]:
    out = Path(tempfile.mkdtemp(dir=folder))
    parts: dict[str, Any] = {
        "strategy": "shm",
        "runner": {"type": "agentlightning.LitAgentRunner", "concurrency": 16},
        "progress": "none",
    }
    trainer = agl.Trainer(
        algorithm=demo_grpo(
            model=folder / "model",
            max_steps=STEPS,
            batch_size=BATCH_SIZE,
            minibatch_rollouts=settings.MINIBATCH_ROLLOUTS,
            temperature=settings.TEMPERATURE,
            curriculum=curriculum,
            alarms="none",
            seed=seed,
            output_dir=out / "run",
        ),
        store=agl.InMemoryLightningStore(),
        **parts,
    )
    trainer.fit(answer, train_dataset=tasks)
    length = settings.MAX_COMPLETION_LENGTH
    rates = agl.task_rates(
        answer,
        validation,
        model=out / "run" / "model",
        n_samples=1,
        max_completion_length=length,
        resource_name="llm",
        trainer=agl.Trainer(**parts),
    )
    solved = statistics.fmean(rate.mean_reward or 0.0 for rate in rates)
    return solved, sum(f.groups["compared"] - f.groups["equal_rewards"] for f in trainer.result.metrics)
