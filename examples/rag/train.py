"""Train an agent that searches: make a model, measure it, train it on the correctness of its answers, measure again."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from agent import answers
from facts import make_index, tasks
from first_model import STEPS, make_first_model

import agentlightning as agl


def train(model: Path, index: Path, folder: Path, steps: int, held_out: int, store: str | None) -> None:
    """Train, and print the share of answered held-out questions by the number of updates."""
    trainer = agl.Trainer(
        algorithm=agl.GRPO(
            model=model,
            max_steps=steps,
            batch_size=16,  # questions per step
            num_generations=8,  # rollouts per question
            num_iterations=2,  # passes over the rollouts
            minibatch_rollouts=32,
            learning_rate=3e-4,
            lr_scheduler_type="linear",
            max_completion_length=32,
            eval_steps=max(1, steps // 4),
            output_dir=folder,
        ),
        store=store,
        runner={"concurrency": 8},
    )
    questions = tasks("held_out", index)[:held_out]
    trainer.fit(answers, train_dataset=tasks("train", index), val_dataset=questions)
    print(f"updates  answered, of {len(questions)} held-out questions, sampled")
    for evaluation in trainer.result.evaluations:
        if evaluation.sampling == "sampled":
            solved = evaluation.accuracy or 0.0
            print(f"{evaluation.step:7}  {solved:4.0%}  {'#' * round(40 * solved)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--held-out", type=int, default=128, help="number of held-out questions")
    parser.add_argument("--imitation-steps", type=int, default=STEPS, help="imitation steps of the small model")
    parser.add_argument("--model", type=Path, help="folder of your own model")
    parser.add_argument("--out", type=Path, help="empty folder for the trained model")
    parser.add_argument("--external-store-address", metavar="URL", help="store server (agl store) for the run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "facts.db"
        make_index(index)
        model = options.model
        if model is None:
            model = Path(folder) / "model"
            make_first_model(model, steps=options.imitation_steps)
        train(
            model,
            index,
            options.out or Path(folder) / "run",
            options.steps,
            options.held_out,
            options.external_store_address,
        )


if __name__ == "__main__":
    main()
