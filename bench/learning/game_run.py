"""Training on the game of `game.py` through the whole path: store, gateway, runner, engine and GRPO."""

from __future__ import annotations

from pathlib import Path

import agentlightning as agl
from agentlightning.training.learner.policy import Policy
from bench.learning.game import NUMBERS, Game
from bench.learning.game_policy import make_player, play, player_value

STEPS = 32
"""Enough for stable results: after 20 a run without `deterministic` may end at 0.63, and the next one at 0.78."""


def train_player(folder: Path, seed: int) -> tuple[float, float]:
    """Return the exact expected reward of the player after the warm start and after training."""
    before = make_player(folder / "model", seed)
    games: list[Game] = [{"hidden": number} for number in NUMBERS]
    trainer = agl.Trainer(
        algorithm=agl.GRPO(
            model=folder / "model",
            max_steps=STEPS,
            batch_size=10,
            num_generations=8,
            num_iterations=2,
            minibatch_rollouts=20,
            learning_rate=5e-4,
            lr_scheduler_type="linear",
            max_completion_length=4,
            seed=seed,
            deterministic=True,
            output_dir=folder / "run",
            progress="none",
        ),
        store=agl.InMemoryLightningStore(),
        strategy="shm",
        runner={"type": "agentlightning.LitAgentRunner", "concurrency": 8},
    )
    trainer.fit(play, train_dataset=games)
    policy = Policy.load(folder / "run" / "model")
    return before, player_value(policy.model, policy.tokenizer)
