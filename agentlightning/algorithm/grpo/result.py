"""What a run leaves behind, and the clock that its figures come from."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from agentlightning.algorithm.grpo.engine.decode_thread import EngineStats
from agentlightning.algorithm.progress import StepFigures
from agentlightning.field_help import explain_fields
from agentlightning.utils.system_snapshot import thread_cpu_seconds

_SERVER_THREADS = ("agl-server", "agl-sqlite", "agl-store", "agl-reaper")


RIGHT = 0.5
"""A task counts as solved when its reward is above this."""


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation, in the order of the tasks."""

    step: int
    """Updates that the weights had seen."""
    sampling: str
    """`sampled` (at the temperature of training) or `greedy`."""
    rewards: list[float | None]
    """None where the rollout failed or earned nothing."""
    rollout_ids: list[str]
    seconds: float

    @property
    def solved(self) -> list[bool]:
        """Whether each task was solved; a failed rollout solved nothing."""
        return [reward is not None and reward > RIGHT for reward in self.rewards]

    @property
    def accuracy(self) -> float:
        """Share of the tasks that were solved."""
        return sum(self.solved) / len(self.rewards) if self.rewards else 0.0

    @property
    def mean_reward(self) -> float | None:
        """Mean over the tasks with a reward; None without any."""
        earned = [reward for reward in self.rewards if reward is not None]
        return math.fsum(earned) / len(earned) if earned else None

    @property
    def is_graded(self) -> bool:
        """Whether some reward is neither 0 nor 1, so that `mean_reward` says more than `accuracy`."""
        return any(reward not in (None, 0.0, 1.0) for reward in self.rewards)

    @override
    def __str__(self) -> str:
        mean = "" if self.mean_reward is None or not self.is_graded else f" (mean reward {self.mean_reward:.3f})"
        return f"{self.accuracy:.1%} {self.sampling}{mean}"

    @property
    def failed(self) -> int:
        """Rollouts without a reward."""
        return sum(reward is None for reward in self.rewards)


@explain_fields
@dataclass
class GRPOResult:
    """What a run leaves behind; the Trainer offers it as `trainer.result`."""

    output_dir: Path
    """Where model and metrics lie."""
    steps: int
    """Updates that were taken."""
    evaluations: list[Evaluation] = field(default_factory=list[Evaluation])
    """Each evaluation, in the order in which they were made."""
    metrics: list[StepFigures] = field(default_factory=list[StepFigures])
    """The figures of each step."""
    train_seconds: float = 0.0
    """From the first step to the last, evaluations between steps left out."""
    late_calls: dict[str, int] = field(default_factory=dict[str, int])
    """Model calls that ended after the last step had closed, by the reason of their exclusion."""

    @property
    def model_path(self) -> Path:
        """Where the trained model is."""
        return self.output_dir / "model"

    def evaluation(self, sampling: str, *, last: bool) -> Evaluation | None:
        """Return the first or the last evaluation with this `sampling` (`sampled` or `greedy`)."""
        found = [e for e in self.evaluations if e.sampling == sampling]
        return (found[-1] if last else found[0]) if found else None

    @override
    def __str__(self) -> str:
        lines = [f"{self.steps} updates, {self.train_seconds:.1f} s of training"]
        rewards = [step.mean_reward for step in self.metrics if step.mean_reward is not None]
        if rewards:
            lines[0] += f", mean reward of a step {rewards[0]:.3f} -> {rewards[-1]:.3f}"
        for sampling in dict.fromkeys(each.sampling for each in self.evaluations):
            found = [each for each in self.evaluations if each.sampling == sampling]
            shares = f"{_shown(found[0])} -> {_shown(found[-1])}"
            lines.append(f"{len(found[0].rewards)} held-out tasks, {sampling}: {shares}")
        calls = sum(step.calls_captured for step in self.metrics)
        trained = sum(step.calls_trained for step in self.metrics)
        late = sum(self.late_calls.values())
        lines.append(
            f"{calls + late} model calls, {trained} trained, {calls - trained + late} excluded (agl runs ledger)"
        )
        return "\n".join([*lines, f"the model is in {self.model_path}"])


def _shown(one: Evaluation) -> str:
    mean = f", mean reward {one.mean_reward:.3f}" if one.is_graded and one.mean_reward is not None else ""
    return f"{one.accuracy:.1%} solved{mean}"


class CountsTokens(Protocol):
    """An engine, or several."""

    def stats(self) -> EngineStats:
        """Return sums since the start."""
        ...


class StepClock:
    """Measures one step: wall seconds by phase, CPU seconds of the servers' threads, tokens generated."""

    def __init__(self, engines: CountsTokens) -> None:
        self._engine = engines
        self._began = self._sampled = time.monotonic()
        self._cpu = thread_cpu_seconds(_SERVER_THREADS)
        self._engine_before = engines.stats()

    def sampled(self) -> None:
        """The rollouts of the step are there."""
        self._sampled = time.monotonic()

    def stop(self) -> tuple[dict[str, float], dict[str, float], int]:
        """Return seconds by phase, CPU seconds, and tokens."""
        before, after = self._engine_before, self._engine.stats()
        generate = after.busy_seconds - before.busy_seconds
        wait = max(0.0, self._sampled - self._began - generate)
        seconds = {"generate": generate, "wait": wait, "train": time.monotonic() - self._sampled}
        cpu = {"store_and_gateway": thread_cpu_seconds(_SERVER_THREADS) - self._cpu}
        return seconds, cpu, after.completion_tokens - before.completion_tokens
