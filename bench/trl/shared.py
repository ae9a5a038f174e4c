"""The shared code of both sides: the budget, the settings, and the measurement of a run."""

from __future__ import annotations

import json
import resource
from dataclasses import asdict, dataclass

from agentlightning.demo import settings
from agentlightning.demo.tasks import Task, make_tasks

LEARNING_RATE, STEPS = 2e-4, 14  # of the measured table in docs/algorithms/grpo.md
TASKS = settings.BATCH_SIZE
GROUP = settings.NUM_GENERATIONS


@dataclass(frozen=True)
class Run:
    """One training run of one side."""

    side: str
    seed: int
    cpu_seconds: float
    held_out_before: float
    held_out: float
    """Share of the held-out tasks solved after the last step, sampled."""
    curve: list[float]
    """Mean reward of each step."""

    def print(self) -> None:
        """Write the run as the last line, for the process that compares."""
        print(json.dumps(asdict(self)), flush=True)


def tasks_of_demo() -> tuple[list[Task], list[Task]]:
    """Return tasks to train and tasks held out, the same for both sides and all seeds."""
    return make_tasks(0)


def cpu_seconds() -> float:
    """Return the processor seconds that this process has used so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
