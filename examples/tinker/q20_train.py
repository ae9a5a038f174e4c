"""Train a player of twenty questions. The first argument chooses the algorithm; the rest of the program is the same."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any, Final

from first_player import STEPS, make_first_model
from player import Task, plays
from things import MOST_TURNS, secrets

import agentlightning as agl

MODELS: Final = {"qwen25": "Qwen/Qwen2.5-1.5B-Instruct", "qwen3": "Qwen/Qwen3-4B-Instruct-2507"}
_GROUP: Final = {"games": 16, "each": 8}  # things per step, games per thing


def grpo(model: str | Path, folder: Path, options: argparse.Namespace) -> agl.Algorithm:
    """Return this package's learner, on this machine."""
    return agl.GRPO(
        model=model,
        max_steps=options.steps,
        batch_size=_GROUP["games"],
        num_generations=_GROUP["each"],
        num_iterations=2,  # passes over the games
        minibatch_rollouts=32,
        learning_rate=6e-4,
        lr_scheduler_type="linear",
        max_completion_length=32,  # enough for a search with all ten properties
        eval_steps=max(1, options.steps // 2),
        output_dir=folder,
    )


def verl(model: str | Path, folder: Path, options: argparse.Namespace) -> agl.Algorithm:
    """Return VERL's trainer with vLLM, on the GPUs of this machine."""
    return agl.VERL(
        {
            "actor_rollout_ref.model.path": str(model),
            "actor_rollout_ref.rollout": {"n": _GROUP["each"], "name": "vllm", "gpu_memory_utilization": 0.5},
            "actor_rollout_ref.actor": {"ppo_mini_batch_size": 4, "optim.lr": 1e-6},
            "data": {"train_batch_size": _GROUP["games"], "max_prompt_length": 4096, "max_response_length": 512},
            "trainer": {"n_gpus_per_node": options.gpus, "total_training_steps": options.steps},
            "trainer.test_freq": max(1, options.steps // 2),
            "agentlightning": {"output_dir": str(folder)},
        }
    )


def tinker(model: str | Path, folder: Path, options: argparse.Namespace) -> agl.Algorithm:
    """Return a learner of adapters (LoRA) on the machines of the Tinker service."""
    return agl.Tinker(
        model=str(model),
        max_steps=options.steps,
        batch_size=_GROUP["games"],
        num_generations=_GROUP["each"],
        learning_rate=1e-4,
        max_completion_length=512,
        eval_steps=max(1, options.steps // 2),
        output_dir=folder,
    )


def train(algorithm: agl.Algorithm, options: argparse.Namespace) -> None:
    """Train, and print the results of games for held-out things by the number of updates."""
    trained, unknown = secrets()
    tasks = [Task(thing=name, search=options.search) for name in trained]
    held_out = [Task(thing=name, search=options.search) for name in unknown] * options.games
    trainer = agl.Trainer(
        algorithm=algorithm,
        store=options.external_store_address,
        port=None if options.external_store_address else options.port,
        runner={"concurrency": 8},
        n_runners=1,
    )
    trainer.fit(plays, train_dataset=tasks, val_dataset=held_out)
    print(f"updates  found, of {len(held_out)} games for {len(unknown)} held-out things   turns if found   mean reward")
    for evaluation in trainer.result.evaluations:
        if evaluation.sampling == "sampled":
            rewards = [reward or 0.0 for reward in evaluation.rewards]
            turns = [1 + 2 * MOST_TURNS * (1 - reward) for reward in rewards if reward]
            share, mean = len(turns) / len(rewards), sum(turns) / max(1, len(turns))
            bar = "#" * round(40 * share)
            print(f"{evaluation.step:7}  {share:4.0%}  {bar:40}  {mean:13.1f}  {sum(rewards) / len(rewards):11.2f}")


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line, with a command for each algorithm."""
    parser = argparse.ArgumentParser(description=__doc__)
    subparsers = parser.add_subparsers(dest="algorithm", required=True)
    shared: dict[str, Any] = {"choices": ("qwen25", "qwen3"), "help": "Model variant to train."}

    ours = subparsers.add_parser("grpo", help="Train with GRPO on this machine; a small model is created first.")
    ours.add_argument("--model", default=None, **shared)
    ours.add_argument("--imitation-steps", type=int, default=STEPS, help="Imitation steps of the small model.")

    theirs = subparsers.add_parser("verl", help="Train with VERL on the GPUs of this machine.")
    theirs.add_argument("--model", default="qwen3", **shared)
    theirs.add_argument("--gpus", type=int, default=1, help="Number of GPUs on this machine.")

    service = subparsers.add_parser("tinker", help="Train with the Tinker service; needs TINKER_API_KEY.")
    service.add_argument("--model", default="qwen3", **shared)

    for each in (ours, theirs, service):
        each.add_argument("--port", type=int, default=4747, help="Port of the store of the run.")
        each.add_argument("--search", action="store_true", help="Give the player the search tool.")
        each.add_argument("--steps", type=int, default=20, help="Number of updates.")
        each.add_argument("--games", type=int, default=5, help="Games for each held-out thing in an evaluation.")
        each.add_argument("--out", type=Path, help="Empty folder for the run.")
        each.add_argument("--external-store-address", metavar="URL", help="Store server (agl store) for the run.")
    return parser


def main() -> None:
    options = arguments().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder) / "run"
        model: str | Path = MODELS.get(options.model, Path(folder) / "model")
        if options.model is None:
            make_first_model(Path(model), searches=options.search, steps=options.imitation_steps)
        train({"grpo": grpo, "verl": verl, "tinker": tinker}[options.algorithm](model, out, options), options)


if __name__ == "__main__":
    main()
