"""Every algorithm learns to please an agent from a model that knows nothing; VERL takes too long for it, and for two
policies there is `test_proofs.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.training.conformance.cases import AHEAD, GRPO, PPO, SFT, TRL, Case, Digits, assert_complete, each, fit, read

TASKS = [f"task {number}" for number in range(24)]


@each(GRPO, AHEAD, PPO, SFT, TRL)
def test_the_reward_rises(case: Case, untrained_model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_generations": 8, "learning_rate": 5e-3, "save_steps": 0, **case.learns}
    result = fit(case, Digits, untrained_model, tmp_path, tasks=TASKS, **settings)
    rewards = [figures.mean_reward or 0.0 for figures in result.metrics]
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.2, rewards
    assert_complete(read(tmp_path), len(rewards))
