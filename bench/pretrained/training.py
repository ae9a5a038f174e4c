"""GRPO on the adapters of SmolLM2 through the whole path: store, gateway, runner, engine and learner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import agentlightning as agl
from agentlightning.evaluation.paired import compare_rewards
from agentlightning.training.result import GRPOResult
from bench.pretrained.agent import names_kind
from bench.pretrained.words import Item

GAIN, P_VALUE = 0.20, 0.01
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
    own = {**SETTINGS, **settings}
    trainer = trainer_of(agl.GRPO(model=model, lora=LORA, seed=seed, output_dir=folder, progress="plain", **own), store)
    trainer.fit(names_kind, train_dataset=list(train_items), val_dataset=list(held_out))
    return trainer.result


def trainer_of(algorithm: agl.Algorithm, store: agl.LightningStore | None = None) -> agl.Trainer:
    """Return the trainer of this task, with all rollouts of a step at once."""
    return agl.Trainer(
        algorithm=algorithm,
        store=store or agl.InMemoryLightningStore(),
        strategy="shm",
        runner={"type": "agentlightning.LitAgentRunner", "concurrency": 64},
    )


def gained(result: GRPOResult, sampling: str, title: str) -> bool:
    """Print the held-out accuracy before and after; return whether it is significantly better, by at least `GAIN`."""
    before, after = result.evaluation(sampling, last=False), result.evaluation(sampling, last=True)
    assert before is not None
    assert after is not None
    comparison = compare_rewards([r or 0.0 for r in before.rewards], [r or 0.0 for r in after.rewards])
    print(f"{title}, {sampling}: {before.accuracy:.1%} before, {after.accuracy:.1%} after; {comparison}", flush=True)
    return after.accuracy - before.accuracy >= GAIN and comparison.p_value < P_VALUE
