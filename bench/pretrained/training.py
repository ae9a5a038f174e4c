"""GRPO on the adapters of SmolLM2 through the whole path: store, gateway, runner, engine and learner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import agentlightning as agl
from agentlightning.training.result import GRPOResult
from bench.pretrained.agent import names_kind
from bench.pretrained.words import Item

LORA: Final[dict[str, Any]] = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
SETTINGS: Final[dict[str, Any]] = {
    "max_steps": 6,
    "batch_size": 4,
    "num_generations": 8,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
    "max_completion_length": 6,
    "save_steps": 0,
}


def train(
    model: Path,
    folder: Path,
    train_items: Sequence[Item],
    held_out: Sequence[Item],
    *,
    seed: int = 0,
    store: agl.LightningStore | None = None,
    **settings: Any,
) -> GRPOResult:
    """Train in a new folder; measure on the held-out items before and after."""
    trainer = agl.Trainer(
        algorithm=agl.GRPO(
            model=model, lora=LORA, seed=seed, output_dir=folder, progress="plain", **{**SETTINGS, **settings}
        ),
        store=store or agl.InMemoryLightningStore(),
        strategy="shm",
        runner={"type": "agentlightning.LitAgentRunner", "concurrency": 64},
    )
    trainer.fit(names_kind, train_dataset=list(train_items), val_dataset=list(held_out))
    return trainer.result
