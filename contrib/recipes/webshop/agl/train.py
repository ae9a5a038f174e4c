"""Train an agent in TypeScript, run as a program, by what its purchases are worth to the customer."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from first_model import STEPS, make_first_model
from shop import Task, catalogue, serve, tasks, value

import agentlightning as agl

PROGRAM = Path(__file__).parent / "dist/agent.cjs"


def worth(output: agl.ProgramOutput, task: Task) -> float:
    """Return the share of the wish that the purchase meets; the program's last line says what was bought."""
    if output.exit_code != 0:
        raise RuntimeError(f"the agent ended with exit code {output.exit_code}: {output.stderr[-500:]}")
    bought = json.loads(output.stdout.splitlines()[-1])
    return 0.0 if bought is None else value(task, catalogue().get(bought["id"]), bought["size"])


def train(model: Path, shop: str, folder: Path, steps: int, held_out: int, store: str | None) -> None:
    """Train, and print what purchases for held-out wishes were worth after how many updates."""
    trainer = agl.Trainer(
        algorithm=agl.GRPO(
            model=model,
            max_steps=steps,
            batch_size=16,  # wishes of a step
            num_generations=8,  # rollouts of each
            num_iterations=2,  # passes over them
            minibatch_rollouts=32,
            learning_rate=3e-4,
            lr_scheduler_type="linear",
            max_completion_length=24,
            eval_steps=max(1, steps // 3),
            output_dir=folder,
        ),
        store=store or agl.InMemoryLightningStore(),
        strategy="shm",
        runner={"concurrency": 8},
        reward_fn=worth,
    )
    agent = agl.CommandAgent(["node", str(PROGRAM)], env={"SHOP_URL": shop}, reward="reward_fn", timeout_seconds=60)
    wishes = tasks("held_out")[:held_out]
    trainer.fit(agent, train_dataset=tasks("train"), val_dataset=wishes)
    print(f"updates  met in full, of {len(wishes)} held-out wishes, sampled           mean reward")
    for evaluation in trainer.result.evaluations:
        if evaluation.sampling == "sampled":
            rewards = [reward or 0.0 for reward in evaluation.rewards]
            full = rewards.count(1.0) / len(rewards)
            print(f"{evaluation.step:7}  {full:4.0%}  {'#' * round(40 * full):40}  {sum(rewards) / len(rewards):11.2f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--held-out", type=int, default=96, help="wishes to measure with")
    parser.add_argument("--imitation-steps", type=int, default=STEPS, help="how long the small model is prepared")
    parser.add_argument("--model", type=Path, help="folder of a model of your own")
    parser.add_argument("--out", type=Path, help="an empty folder to keep the trained model in")
    parser.add_argument("--external-store-address", metavar="URL", help="of a store server (agl store) to train on")
    options = parser.parse_args()
    if shutil.which("node") is None:
        parser.error("the agent is a Node program, and there is no node (20 or newer) on the PATH")
    if not PROGRAM.exists():
        parser.error(f"{PROGRAM} is not built: run `npm ci && npm run build` in {PROGRAM.parents[1]}")
    with tempfile.TemporaryDirectory() as folder, serve() as shop:
        model = options.model
        if model is None:
            model = Path(folder) / "model"
            make_first_model(model, steps=options.imitation_steps)
        train(
            model,
            shop,
            options.out or Path(folder) / "run",
            options.steps,
            options.held_out,
            options.external_store_address,
        )


if __name__ == "__main__":
    main()
