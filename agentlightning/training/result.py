"""The result of a training run, and the clock for its metrics."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

from typing_extensions import override

from agentlightning.base.field_help import explain_fields
from agentlightning.base.terminal import counted
from agentlightning.engine.policy_engine import EngineStats
from agentlightning.evaluation.paired import PairedComparison, compare_rewards
from agentlightning.evaluation.statistics import interval_of
from agentlightning.training.progress import StepFigures
from agentlightning.utils.system_snapshot import thread_cpu_seconds

_SERVER_THREADS = ("agl-server", "agl-sqlite", "agl-store", "agl-reaper")


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation, in the order of the tasks."""

    step: int
    """Number of updates before the evaluation."""
    sampling: str
    """`sampled` (at the temperature of training) or `greedy`."""
    rewards: list[float | None]
    """Reward of each task; None if the rollout failed or has no reward."""
    rollout_ids: list[str]
    seconds: float
    solved_above: float | None = None
    """Reward above which a task counts as solved; None for rewards of 0 and 1 only."""
    follows_graded: bool = False
    """Whether an earlier evaluation of the run has rewards other than 0 and 1."""

    @property
    def solved(self) -> list[bool] | None:
        """Whether each task is solved; a failed rollout counts as not solved. None for graded rewards without
        `solved_above`."""
        if self.solved_above is None and self.is_graded:
            return None
        limit = 0.5 if self.solved_above is None else self.solved_above  # 0.5 is between rewards of 0 and 1
        return [reward is not None and reward > limit for reward in self.rewards]

    @property
    def accuracy(self) -> float | None:
        """Share of solved tasks; None if `solved` is None."""
        solved = self.solved
        return None if solved is None else sum(solved) / max(1, len(solved))

    @property
    def mean_reward(self) -> float | None:
        """Mean over the tasks with a reward; None without any."""
        earned = [reward for reward in self.rewards if reward is not None]
        return math.fsum(earned) / len(earned) if earned else None

    @property
    def is_graded(self) -> bool:
        """Whether a reward, of this evaluation or an earlier one of the run, is neither 0 nor 1."""
        return self.follows_graded or any(reward not in (None, 0.0, 1.0) for reward in self.rewards)

    def compare(self, other: Evaluation) -> PairedComparison:
        """Return the paired test (`compare_rewards`) of a later evaluation of the same tasks against this one."""
        return compare_rewards(self.rewards, other.rewards)

    def change_from_best(self, earlier: Iterable[Evaluation]) -> dict[str, float]:
        """Return the difference from the best earlier evaluation with the same `sampling`, over the tasks that have a
        reward in both: see `StepFigures.held_out_change`. Empty if no task has a reward in both."""
        candidates = [(e.mean_reward, e) for e in earlier if e.sampling == self.sampling and e.mean_reward is not None]
        if not candidates:
            return {}
        mean, best = max(candidates, key=itemgetter(0))
        pairs = best.compare(self)
        if pairs.difference is None:
            return {}
        rewards = [reward for reward in (*best.rewards, *self.rewards) if reward is not None]
        figures = {"best": mean, "updates": best.step, "change": pairs.difference.mean}
        return {**figures, "range": max(rewards) - min(rewards), "p_value": pairs.p_value, "pairs": pairs.pairs}

    @property
    def failed(self) -> int:
        """Number of rollouts without a reward."""
        return sum(reward is None for reward in self.rewards)

    @override
    def __str__(self) -> str:
        earned = [reward for reward in self.rewards if reward is not None]
        mean = "-" if (interval := interval_of(earned)) is None else interval.text(named=True)
        tasks = counted(len(self.rewards), "task")
        share = tasks if self.solved is None else f"{sum(self.solved)} of {tasks} solved"
        return f"{self.sampling}: mean reward {mean}, {share}{f', {self.failed} without a reward' * bool(self.failed)}"


@explain_fields
@dataclass
class GRPOResult:
    """The result of a run, available as `trainer.result`."""

    output_dir: Path
    """The folder with the model and the metrics."""
    steps: int
    """Number of updates."""
    evaluations: list[Evaluation] = field(default_factory=list[Evaluation])
    """All evaluations, in order of time."""
    metrics: list[StepFigures] = field(default_factory=list[StepFigures])
    """The metrics of each step."""
    train_seconds: float = 0.0
    """Seconds from the first step to the last, excluding evaluations between steps."""
    late_calls: dict[str, int] = field(default_factory=dict[str, int])
    """Number of model calls that ended after the last step had closed, by the reason of their exclusion."""

    run_id: str = ""
    """The run's id in `store`; empty for the run without a name."""
    store: str = ""
    """The store of the run, in the form that `--store` accepts if it has one; empty without a Trainer."""

    @property
    def model_path(self) -> Path:
        """The folder of the trained model."""
        return self.output_dir / "model"

    def evaluation(self, sampling: str, *, last: bool) -> Evaluation | None:
        """Return the first or the last evaluation with this `sampling` (`sampled` or `greedy`)."""
        matches = [e for e in self.evaluations if e.sampling == sampling]
        return (matches[-1] if last else matches[0]) if matches else None

    @override
    def __str__(self) -> str:
        lines = [f"{counted(self.steps, 'update')}, {self.train_seconds:.1f} s of training"]
        rewards = [step.mean_reward for step in self.metrics if step.mean_reward is not None]
        if rewards:
            lines[0] += f", mean reward per step {rewards[0]:.3f} -> {rewards[-1]:.3f}"
        for sampling in dict.fromkeys(each.sampling for each in self.evaluations):
            matches = [each for each in self.evaluations if each.sampling == sampling]
            first, last = matches[0], matches[-1]
            means, paired = f"mean reward {_mean(first)} -> {_mean(last)}", first.compare(last)
            if first.accuracy is not None and last.accuracy is not None:
                means += f" ({first.accuracy:.1%} -> {last.accuracy:.1%} solved)"
            if paired.difference is not None:
                means += f", difference {paired.difference.text(signed=True, named=True)}"
            test = f"{paired.verdict}, p = {paired.p_value:.2g} ({paired.method})"
            lines.append(f"{counted(len(first.rewards), 'held-out task')}, {sampling}: {means}; {test}")
        calls = sum(step.calls_captured for step in self.metrics)
        trained = sum(step.calls_trained for step in self.metrics)
        late = sum(self.late_calls.values())
        excluded = f"{calls - trained + late} excluded{self._ledger_hint()}"
        lines.append(f"{counted(calls + late, 'model call')}, {trained} trained, {excluded}")
        return "\n".join([*lines, f"the model is in {self.model_path}"])

    def _ledger_hint(self) -> str:
        """Return the command that shows why calls were excluded, or how to keep the reasons."""
        if self.store.startswith("memory"):
            return "; to keep the reasons, set store='sqlite:///run.db' of the Trainer"
        place = self.store if "://" in self.store else "STORE"
        command = shlex.join(["agl", "runs", "ledger", self.run_id or "-", "--store", place])
        return f" ({command})" if self.store else ""


def _mean(one: Evaluation) -> str:
    return "-" if one.mean_reward is None else f"{one.mean_reward:.3f}"


class StepClock:
    """Measures one step: wall seconds by phase, CPU seconds of the servers' threads, generated tokens."""

    def __init__(self, engine_stats: Callable[[], EngineStats]) -> None:
        self._engine_stats = engine_stats
        self._began = self._sampled = time.monotonic()
        self._cpu = thread_cpu_seconds(_SERVER_THREADS)
        self._engine_before = engine_stats()

    def sampled(self) -> None:
        """Record that the rollouts of the step have ended."""
        self._sampled = time.monotonic()

    def stop(self) -> tuple[dict[str, float], dict[str, float], int]:
        """Return seconds by phase, CPU seconds, and tokens."""
        before, after = self._engine_before, self._engine_stats()
        generate = after.busy_seconds - before.busy_seconds
        wait = max(0.0, self._sampled - self._began - generate)
        seconds = {"generate": generate, "wait": wait, "train": time.monotonic() - self._sampled}
        cpu = {"store_and_gateway": thread_cpu_seconds(_SERVER_THREADS) - self._cpu}
        return seconds, cpu, after.completion_tokens - before.completion_tokens
