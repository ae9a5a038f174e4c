"""A small algorithm that records all that trackers are told of, run by a real Trainer; and a tracker that remembers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.types.runs import RunRecord

SECRET = "sk-" + "correcthorsebatterystaple" * 2
STEPS = 3


class Recording(agl.Algorithm):
    """Records `steps` steps, an evaluation, an alarm that is raised and over, a checkpoint and a prompt."""

    def __init__(self, steps: int = STEPS, fails: bool = False) -> None:
        self.steps, self.fails = steps, fails
        self.api_key = SECRET
        self.rate = 0.5

    def unused_parts(self) -> frozenset[str]:
        return frozenset(("adapter", "initial_resources"))

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> Any:
        log = self.get_run_log()
        last = await log.latest("state")
        for step in range((last.step if last else 0) + 1, self.steps + 1):
            await log.step(step, {"step": step, "mean_reward": step / 10, "update": {"loss": 1 / step, "nan": None}})
            await log.state(step, {})
        await log.evaluation(2, "held_out", {"solved": 3, "rewards": [0.0, 1.0]}, value=0.75)
        raised = {"since": 2, "value": 1.0, "threshold": 0.9, "what_to_try": "harder tasks", "state": "raised"}
        await log.alarm(2, "equal_rewards", f"all rewards are equal, key {SECRET}", **raised)
        await log.alarm(3, "equal_rewards", "no longer", **{**raised, "state": "over", "what_to_try": ""})
        await log.checkpoint(3, path="runs/x/checkpoint-3")
        await log.prompt(1, "v1", {"text": "be kind"})
        if self.fails:
            raise ValueError(f"the model is gone, key {SECRET}")
        return Trained(Path("runs/x/model"))


class Trained:
    def __init__(self, model_path: Path) -> None:
        self.model_path = model_path


@agl.rollout
def agent(task: str) -> float:
    return 1.0


def run(*trackers: Any, run_id: str = "run-1", store: Any = None, **settings: Any) -> agl.Trainer:
    trainer = agl.Trainer(
        algorithm=Recording(**settings),
        trackers=list(trackers),
        store=store or agl.InMemoryLightningStore(),
        strategy="shm",
        progress="none",
    )
    trainer.fit(agent, run_id=run_id)
    return trainer


class Remembers:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.runs: list[agl.TrackedRun] = []
        self.records: list[RunRecord] = []
        self.endings: list[agl.RunEnding] = []

    def start(self, run: agl.TrackedRun) -> None:
        self.runs.append(run)

    def record(self, record: RunRecord) -> None:
        self.records.append(record)

    def finish(self, ending: agl.RunEnding) -> None:
        self.endings.append(ending)

    @property
    def told(self) -> list[tuple[str, int, str]]:
        """Kind, step and name of each record."""
        return [(record.kind, record.step, record.name) for record in self.records]
