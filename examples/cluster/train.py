"""One program for every cluster: the agent for the runners, and the algorithm that trains its model.

Start a runner with `agl runner train.py:agent`, and the algorithm with this program and `AGL_CURRENT_ROLE=algorithm`.
Without that variable it runs both on this machine. With `--ray`, the runners are actors of a Ray cluster. With the same
`AGL_RUN_ID`, store and `--out` as an earlier start, it resumes from the last checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.demo.calculator import TOOLS, run_tool
from agentlightning.demo.tasks import Task, make_tasks
from agentlightning.execution import exit_code_of

_clients: list[Any] = []


def client() -> Any:
    """Return the one client for all rollouts of a process. (Ray cannot send a function with `functools.cache`.)"""
    import openai

    if not _clients:
        _clients.append(openai.OpenAI(base_url="http://127.0.0.1/", api_key="unused"))
    return _clients[0]


@agl.rollout
def agent(task: Task, llm: agl.LLM) -> float:
    """Answer a question with a calculator; the reward is 1.0 for the correct number."""
    model = client().with_options(base_url=llm.endpoint, api_key=llm.api_key or "unused")
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    for _ in range(3):
        reply = model.chat.completions.create(
            model=llm.model, messages=messages, tools=TOOLS, **llm.sampling_parameters
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return float(message.content == str(task["answer"]))
        messages.append(message)
        for call in message.tool_calls:
            result = run_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def first_model(folder: Path) -> Path:
    """Return the small model that training starts from. It is created once; an interrupted attempt leaves no model."""
    from agentlightning.demo.imitation import make_policy

    made, begun = folder / "first-model", folder / "first-model.begun"
    if not made.exists():
        make_policy(begun)
        begun.rename(made)
    return made


def train(options: argparse.Namespace) -> None:
    """Train, and plot the share of solved held-out tasks by the number of updates."""
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    tasks, held_out = make_tasks(train=512, held_out=options.held_out)
    trainer = agl.Trainer(
        algorithm=agl.GRPO(
            model=options.model or first_model(out),
            device=options.device,
            max_steps=options.steps,
            batch_size=16,  # tasks per step
            num_generations=8,  # rollouts per task
            num_iterations=2,  # passes over the rollouts
            minibatch_rollouts=32,
            learning_rate=options.learning_rate,
            lr_scheduler_type="linear",
            max_completion_length=options.max_completion_length,
            eval_steps=2,
            save_steps=2,  # steps between checkpoints
            output_dir=out / "run",
        ),
        # Runners call the model through the gateway: on other machines they need an address that is not loopback.
        llm_proxy={"host": options.gateway_host, "port": options.gateway_port},
        strategy={"type": "ray", "address": options.ray} if options.ray else "cs",
        runner={"concurrency": 8},
        n_runners=options.runners,
    )
    trainer.fit(agent, train_dataset=tasks, val_dataset=held_out)
    if trainer.result is None:
        sys.exit("the run was stopped before its end")
    print(f"updates  solved, of {len(held_out)} held-out tasks, sampled")
    for evaluation in trainer.result.evaluations:
        if evaluation.sampling == "sampled":
            solved = evaluation.accuracy or 0.0
            print(f"{evaluation.step:7}  {solved:4.0%}  {'#' * round(40 * solved)}")
    print(f"the trained model is in {out / 'run/model'}")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--out", type=Path, default=Path("runs/cluster"), help="folder of the run, on a persistent disk"
    )
    parser.add_argument("--model", type=Path, help="folder of your own model")
    parser.add_argument("--device", default="cpu", help="device of the algorithm: cpu or cuda")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--max-completion-length", type=int, default=24, help="maximum number of tokens of one reply")
    parser.add_argument("--held-out", type=int, default=128, help="number of held-out tasks")
    parser.add_argument("--runners", type=int, default=2, help="number of runner processes that this program starts")
    parser.add_argument("--ray", metavar="ADDRESS", help="Ray cluster of the runners: auto, local, HOST:PORT")
    parser.add_argument(
        "--gateway-host", default="127.0.0.1", help="gateway host; 0.0.0.0 for runners on other machines"
    )
    parser.add_argument("--gateway-port", type=int, help="gateway port; a free port by default")
    return parser


def main() -> None:
    try:
        train(parser().parse_args())
    except Exception as error:
        if (code := exit_code_of(error)) == 1:
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(code)


if __name__ == "__main__":
    main()
