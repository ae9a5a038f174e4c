"""Train a small model that drives mini-swe-agent in sandboxes. Started again, the program continues a killed run."""

from __future__ import annotations

import argparse
from pathlib import Path

from agent import agent
from counting import write_tasks
from first_model import make_first_model

import agentlightning as agl


def train(folder: Path, steps: int, tasks: int, held_out: int) -> None:
    """Train, or continue a run in the same folder, and print the share of solved tasks before and after."""
    model = folder / "model"
    if not model.exists():
        print("making the first model, which takes about a minute", flush=True)
        make_first_model(folder / "new")
        (folder / "new").rename(model)  # complete, even if the program is killed
    algorithm = agl.GRPO(
        model=model,
        max_steps=steps,
        batch_size=tasks,  # tasks per step
        num_generations=8,  # rollouts per task
        num_iterations=2,  # passes over the rollouts
        minibatch_rollouts=24,
        learning_rate=4e-4,
        lr_scheduler_type="linear",
        max_completion_length=48,
        save_steps=1,
        output_dir=folder / "run",
    )
    trainer = agl.Trainer(
        algorithm=algorithm, store=f"sqlite:///{folder / 'store.db'}", n_runners=1, runner={"concurrency": 3}
    )
    trainer.fit(
        agent,
        train_dataset=write_tasks("train", steps * tasks, folder / "tasks"),
        val_dataset=write_tasks("held_out", held_out, folder / "tasks"),
        run_id="counting",
    )
    for evaluation in trainer.result.evaluations:
        print(f"{evaluation.step} updates, {evaluation.sampling}: {evaluation.accuracy:.0%} of held-out tasks solved")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/harness"), help="Folder of the run.")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=5, help="Tasks per step.")
    parser.add_argument("--held-out", type=int, default=20, help="Held-out tasks.")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    train(options.out.absolute(), options.steps, options.tasks, options.held_out)


if __name__ == "__main__":
    main()
