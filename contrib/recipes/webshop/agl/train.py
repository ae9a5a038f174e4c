"""Train an agent in TypeScript, run as a program, on the value of its purchases to the customer."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from first_model import STEPS, make_first_model
from run_rollouts import check_program, customer, parser_of_role, run, worth
from shop import serve, tasks

import agentlightning as agl


def train(options: argparse.Namespace, model: Path, shop: str, folder: Path) -> None:
    """Train, and print the value of purchases for held-out wishes by the number of updates."""
    steps: int = options.steps
    trainer = agl.Trainer(
        algorithm=agl.GRPO(
            model=model,
            max_steps=steps,
            batch_size=16,  # wishes per step
            num_generations=8,  # rollouts per wish
            num_iterations=2,  # passes over the rollouts
            minibatch_rollouts=32,
            learning_rate=3e-4,
            lr_scheduler_type="linear",
            max_completion_length=24,
            eval_steps=max(1, steps // 3),
            output_dir=folder,
        ),
        store=options.external_store_address,
        # Runners call the model through the gateway: on other machines they need an address that is not loopback.
        llm_proxy={"host": options.gateway_host, "port": options.gateway_port},
        strategy="shm" if role() == "both" else "cs",
        runner={"concurrency": 8},
        reward_fn=worth,
    )
    wishes = tasks("held_out")[: options.held_out]
    trainer.fit(customer(shop), train_dataset=tasks("train"), val_dataset=wishes)
    if trainer.result is None:
        sys.exit("the run was stopped before its end")
    print(f"updates  met in full, of {len(wishes)} held-out wishes, sampled           mean reward")
    for evaluation in trainer.result.evaluations:
        if evaluation.sampling == "sampled":
            rewards = [reward or 0.0 for reward in evaluation.rewards]
            full = rewards.count(1.0) / len(rewards)
            print(f"{evaluation.step:7}  {full:4.0%}  {'#' * round(40 * full):40}  {sum(rewards) / len(rewards):11.2f}")


def role() -> str:
    return os.environ.get("AGL_CURRENT_ROLE", "both")


def main() -> None:
    parser = parser_of_role()
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--held-out", type=int, default=96, help="number of held-out wishes")
    parser.add_argument("--imitation-steps", type=int, default=STEPS, help="imitation steps of the small model")
    parser.add_argument("--model", type=Path, help="folder of your own model")
    parser.add_argument("--out", type=Path, help="empty folder for the trained model")
    parser.add_argument(
        "--gateway-host", default="127.0.0.1", help="gateway host; 0.0.0.0 for runners on other machines"
    )
    parser.add_argument("--gateway-port", type=int, help="gateway port; a free port by default")
    options = parser.parse_args()
    if role() == "runner":
        parser.error("AGL_CURRENT_ROLE is runner: use run_rollouts.py to start runners")
    check_program(parser)
    shop = os.environ.get("SHOP_URL")
    with tempfile.TemporaryDirectory() as folder, nullcontext(shop) if shop else serve() as address:
        model = options.model
        if model is None:
            model = Path(folder) / "model"
            make_first_model(model, steps=options.imitation_steps)
        train(options, model, address, options.out or Path(folder) / "run")


if __name__ == "__main__":
    run(main)
