"""Train a pretrained model on a CPU: SmolLM2-135M-Instruct, adapters (LoRA), GRPO."""
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The framework is in a separate environment (constraints.txt), where its types are known.

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from agent import names_kind
from pydantic_ai.exceptions import UnexpectedModelBehavior

import agentlightning as agl
from agentlightning.evaluation.paired import compare_rewards
from bench.pretrained.words import make_items
from bench.prompts.model import unpacked


def train(model: Path, folder: Path, steps: int, held_out: int) -> None:
    """Train on 80 prompts; print the share of right answers to held-out ones before and after."""
    items, others = make_items()
    trainer = agl.Trainer(
        algorithm=agl.GRPO(
            model=model,
            lora={"r": 16, "lora_alpha": 32, "target_modules": "all-linear"},
            max_steps=steps,
            batch_size=4,  # prompts per step
            num_generations=8,  # rollouts per prompt
            learning_rate=1e-3,
            lr_scheduler_type="linear",
            max_completion_length=6,
            save_steps=0,
            output_dir=folder,
        ),
        strategy="shm",
        runner={"concurrency": 64},
        policy_faults={UnexpectedModelBehavior: 0.0},  # repeated empty replies
    )
    trainer.fit(names_kind, train_dataset=items, val_dataset=others[:held_out])
    for sampling in ("sampled", "greedy"):
        before, after = (trainer.result.evaluation(sampling, last=last) for last in (False, True))
        assert before is not None
        assert after is not None
        comparison = compare_rewards(*([reward or 0.0 for reward in one.rewards] for one in (before, after)))
        print(f"{sampling}: {before.accuracy:.1%} before, {after.accuracy:.1%} after; {comparison}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path("build/prompts"), help="folder of the unpacked wheel")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--held-out", type=int, default=120, help="number of held-out prompts, at most 120")
    options = parser.parse_args()
    agl.setup_logging("ERROR")
    model = unpacked(options.data, options.data / "model")
    with tempfile.TemporaryDirectory() as folder:
        train(model, Path(folder) / "run", options.steps, options.held_out)


if __name__ == "__main__":
    main()
