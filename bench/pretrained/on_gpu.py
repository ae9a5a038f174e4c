"""The same task on one GPU, with VERL or with GRPO and vLLM: compares the curve with the expected one.

make bench-gpu ARGS="--trainer verl"

Needs a CUDA device with 16 GB, and an environment with the extra `verl` or `vllm`; without them it reports what is
missing, and ends with 0. Expected, from `make bench-pretrained` on a CPU: 33 % of the held-out items before, 20 points
more after six steps, p below 0.01, and a mean reward that is higher in the last two steps than in the first two. Exit 0
only then.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import agentlightning as agl
from agentlightning.training.result import GRPOResult
from bench.pretrained.agent import names_kind
from bench.pretrained.training import LORA, SETTINGS, gained, trainer_of
from bench.pretrained.words import make_items
from bench.prompts.model import unpacked

TrainerName = Literal["verl", "grpo"]


def missing(trainer: TrainerName) -> str:
    """Return the missing requirements of this machine; empty if it can run."""
    packages = ("torch", "vllm", *(("verl",) if trainer == "verl" else ()))
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    if absent:
        return f"{' and '.join(absent)} not installed: pip install 'agl-framework[{absent[-1]}]'"
    import torch

    return "" if torch.cuda.is_available() else f"no CUDA device: torch {torch.__version__} sees none"


def verl_settings(model: Path, folder: Path, *, seed: int) -> dict[str, Any]:
    """Return VERL's settings for the steps of `SETTINGS`, with vLLM and adapters."""
    rollouts = SETTINGS["num_generations"]
    return {
        "actor_rollout_ref": {
            "model": {
                "path": str(model),
                "lora_rank": LORA["r"],
                "lora_alpha": LORA["lora_alpha"],
                "target_modules": LORA["target_modules"],
            },
            "actor": {
                "strategy": "fsdp2",
                "ppo_mini_batch_size": SETTINGS["batch_size"],
                "ppo_max_token_len_per_gpu": 8192,
                "optim": {"lr": SETTINGS["learning_rate"]},
            },
            "rollout": {
                "name": "vllm",
                "n": rollouts,
                "tensor_model_parallel_size": 1,
                "gpu_memory_utilization": 0.4,
                "load_format": "safetensors",
                "agent": {"num_workers": 1},
            },
        },
        "data": {
            "train_batch_size": SETTINGS["batch_size"],
            "max_prompt_length": 256,
            "max_response_length": 32,
            "seed": seed,
        },
        "trainer": {"n_gpus_per_node": 1, "nnodes": 1, "total_training_steps": SETTINGS["max_steps"]},
        "agentlightning": {
            "output_dir": str(folder),
            "max_completion_length": SETTINGS["max_completion_length"],
            "progress": "plain",
        },
    }


def make_algorithm(trainer: TrainerName, model: Path, folder: Path, *, seed: int) -> agl.Algorithm:
    """Return the algorithm that trains on the GPU."""
    if trainer == "verl":
        return agl.VERL(verl_settings(model, folder, seed=seed))
    placed: dict[str, Any] = {"device": "cuda", "use_vllm": True, "vllm_gpu_memory_utilization": 0.4}
    return agl.GRPO(model=model, lora=LORA, seed=seed, output_dir=folder, progress="plain", **SETTINGS, **placed)


def on_target(result: GRPOResult) -> bool:
    """Print the curve and both measurements; return whether they are as expected."""
    rewards = [figures.mean_reward or 0.0 for figures in result.metrics]
    print("mean reward by step:", " ".join(f"{reward:.2f}" for reward in rewards))
    rises = sum(rewards[-2:]) > sum(rewards[:2])
    return gained(result, "sampled", "held out") and rises


def main() -> int:
    """Train, or report the missing requirements."""
    parser = argparse.ArgumentParser(prog="bench.pretrained.on_gpu")
    parser.add_argument("--trainer", choices=("verl", "grpo"), default="verl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=Path("build/prompts"), help="folder of the unpacked wheel")
    options = parser.parse_args()
    if lack := missing(options.trainer):
        print(f"skipped: {lack}")
        return 0
    agl.setup_logging("ERROR")
    model = unpacked(options.data, options.data / "model")
    train_items, held_out = make_items(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        algorithm = make_algorithm(options.trainer, model, Path(folder) / "run", seed=options.seed)
        trainer = trainer_of(algorithm)
        trainer.fit(names_kind, train_dataset=list(train_items), val_dataset=list(held_out))
        good = on_target(trainer.result)
    print(f"on target: {good}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
