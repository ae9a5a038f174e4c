"""Train an AutoGen agent with an MCP calculator: make a model, measure it, train it by reward, measure it again."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from agent import solves

import agentlightning as agl
from agentlightning.demo.imitation import make_policy
from agentlightning.demo.tasks import make_tasks


def train(model: Path, folder: Path, steps: int, measured: int, store: str | None) -> None:
    """Train, and plot the share of solved held-out tasks by the number of updates."""
    tasks, held_out = make_tasks(train=512, held_out=measured)
    trainer = agl.Trainer(
        algorithm=agl.GRPO(
            model=model,
            max_steps=steps,
            batch_size=16,  # tasks per step
            num_generations=8,  # rollouts per task
            num_iterations=2,  # passes over the rollouts
            minibatch_rollouts=32,
            learning_rate=3e-4,
            lr_scheduler_type="linear",
            max_completion_length=24,
            eval_steps=2,
            output_dir=folder,
        ),
        store=store,
        runner={"concurrency": 8},
        n_runners=1,
    )
    trainer.fit(solves, train_dataset=tasks, val_dataset=held_out)
    print(f"updates  solved, of {measured} held-out tasks, sampled")
    for evaluation in trainer.result.evaluations:
        if evaluation.sampling == "sampled":
            solved = evaluation.accuracy or 0.0
            print(f"{evaluation.step:7}  {solved:4.0%}  {'#' * round(40 * solved)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--held-out", type=int, default=128, help="number of held-out tasks")
    parser.add_argument("--model", type=Path, help="folder of your own model")
    parser.add_argument("--out", type=Path, help="empty folder for the trained model")
    parser.add_argument("--external-store-address", metavar="URL", help="store server (agl store) for the run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if model is None:
            model = Path(folder) / "model"
            started = make_policy(model)
            print(f"new model: {started.accuracy:.0%} correct on its own tasks", flush=True)
        train(
            model, options.out or Path(folder) / "run", options.steps, options.held_out, options.external_store_address
        )
    if options.out is not None:
        print(f"the run is in {options.out}, the trained model is in {options.out / 'model'}")


if __name__ == "__main__":
    main()
