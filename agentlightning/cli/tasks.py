"""`agl tasks`: measure how often a policy solves each task, and select tasks by that before training."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from agentlightning.base.terminal import counted
from agentlightning.cli.output import JSON, LOG_JSON, LOG_LEVEL, log_to_stderr, say, show_json, show_table

if TYPE_CHECKING:
    from agentlightning.trainer.difficulty import TaskRate
    from agentlightning.types import LLM

app = typer.Typer(no_args_is_help=True)
_TASKS = typer.Argument(metavar="TASKS", help="Tasks: a .jsonl or .json file, or module:object")
_SOLVED = typer.Option(None, help="Reward above which a sample is solved; required for rewards other than 0 and 1")


@app.callback()
def tasks() -> None:
    """Measure the difficulty of tasks for a policy, and select tasks by it.

    Example: agl tasks difficulty tasks.jsonl --agent app:agent --model model --out rates.jsonl
    """


@app.command("difficulty")
def difficulty(
    dataset: str = _TASKS,
    agent: str = typer.Option(help="Agent: module:object or file.py:object"),
    model: str = typer.Option(help="Folder of a model, checkpoint or run, or the base URL of a model server"),
    out: Path = typer.Option(help="File of the results, one JSON line per task; earlier samples in it are kept"),
    model_name: str | None = typer.Option(None, help="Name of the model on the server, if --model is a URL"),
    api_key: str | None = typer.Option(None, help="Name of the environment variable that holds the server's API key"),
    samples: int = typer.Option(8, min=1, help="Number of samples per task"),
    solved_above: float | None = _SOLVED,
    temperature: float = typer.Option(1.0, min=0.0, max=2.0, help="Sampling temperature, as in training"),
    max_completion_length: int = typer.Option(512, min=1, help="Maximum number of tokens per model call"),
    resource_name: str = typer.Option("main_llm", help="Name of the resource with which the agent receives the model"),
    runners: int = typer.Option(1, min=1, help="Number of runner processes"),
    concurrency: int = typer.Option(8, min=1, help="Number of concurrent samples in each process"),
    store: str = typer.Option("memory", help="Store of the rollouts; by default they are not kept"),
    log_level: str = LOG_LEVEL,
    log_json: bool = LOG_JSON,
    as_json: bool = JSON,
) -> int:
    """Run each task several times with a policy, and write how often it is solved.

    A second call with the same task, agent (its name and file) and model runs only samples that are missing. Press
    Ctrl+C to stop; samples that have ended are kept, also after kill -9. Samples without a reward are counted apart,
    and a later call runs them again. A folder is served on the CPU; serve a larger model yourself and pass its URL.

    Example: agl tasks difficulty tasks.jsonl --agent app:agent --model model --out rates.jsonl
    """
    from agentlightning.cli.plan import in_foreground, load_dataset, load_target

    log_to_stderr(log_level, json_lines=log_json)

    def work() -> None:
        from agentlightning.store.spec import spec_of
        from agentlightning.trainer import Trainer
        from agentlightning.trainer.difficulty import task_rates

        if api_key is not None and store != "memory":
            raise ValueError("--api-key and --store cannot be combined: the store would contain the key in plain text")
        source = _source(model, model_name, api_key, {"temperature": temperature, "max_tokens": max_completion_length})
        target = load_target("--agent", agent)
        rates = task_rates(
            target() if isinstance(target, type) else target,
            load_dataset("TASKS", dataset),
            model=source,
            n_samples=samples,
            cache=out,
            solved_above=solved_above,
            temperature=temperature,
            max_completion_length=max_completion_length,
            resource_name=resource_name,
            trainer=Trainer(
                strategy={"type": "cs", "server_port": 0},
                n_runners=runners,
                runner={"concurrency": concurrency},
                store=spec_of(store),
                progress="none",
            ),
        )
        if as_json:
            show_json([rate.as_json() for rate in rates])
        else:
            _show(rates, out)
        if not any(rate.rewards for rate in rates):
            raise typer.Exit(1)

    return in_foreground(work)


@app.command("select")
def select(
    dataset: str = _TASKS,
    rates: Path = typer.Option(help="File of agl tasks difficulty"),
    out: Path = typer.Option(help="File of the selected tasks (.jsonl), for agl run --train"),
    low: float = typer.Option(0.1, min=0.0, max=1.0, help="Minimum solve rate"),
    high: float = typer.Option(0.9, min=0.0, max=1.0, help="Maximum solve rate"),
    solved_above: float | None = _SOLVED,
) -> None:
    """Write the tasks whose solve rate is between two limits.

    Tasks without a reward have no solve rate and are excluded.

    Example: agl tasks select tasks.jsonl --rates rates.jsonl --low 0.1 --out selected.jsonl
    """
    from agentlightning.base.private_files import open_private
    from agentlightning.cli.plan import load_dataset
    from agentlightning.errors import NotFoundError
    from agentlightning.store.rules.values import to_json
    from agentlightning.trainer.difficulty import tasks_between

    if not rates.is_file():
        raise NotFoundError(f"--rates: file {str(rates)!r} not found. Write it with agl tasks difficulty")
    every = load_dataset("TASKS", dataset)
    every = [every[index] for index in range(len(every))]
    selected = tasks_between(every, rates, low, high, solved_above=solved_above)
    with open_private(out, "w") as file:
        file.writelines(json.dumps(to_json(task)) + "\n" for task in selected)
    say(f"{len(selected)} of {counted(len(every), 'task')} written to {out}")
    if not selected:
        raise typer.Exit(1)


def _source(model: str, name: str | None, api_key: str | None, sampling: dict[str, object]) -> str | LLM:
    """Return the folder, or the model of a server."""
    from agentlightning.types import LLM

    is_url = model.startswith(("http://", "https://"))
    if is_url != (name is not None) or (api_key is not None and not is_url):
        raise ValueError("--model-name is required with a URL as --model, and it and --api-key require a URL")
    if api_key is not None and api_key not in os.environ:
        raise ValueError(f"--api-key: the environment variable {api_key!r} is not set")
    if name is None:
        return model
    key = None if api_key is None else os.environ[api_key]
    return LLM(endpoint=model, model=name, api_key=key, sampling_parameters=sampling)


def _show(rates: Sequence[TaskRate], out: Path) -> None:
    solved = [interval.mean for rate in rates if (interval := rate.solve_rate) is not None]
    if any(rate.solved_above is None for rate in rates):
        say("rewards other than 0 and 1 have no solve rate: set --solved-above")
    else:
        lines = [
            ("never solved", sum(rate == 0 for rate in solved)),
            ("solved, below one half", sum(0 < rate < 0.5 for rate in solved)),
            ("one half or more", sum(0.5 <= rate < 1 for rate in solved)),
            ("always solved", sum(rate == 1 for rate in solved)),
            ("without a reward", len(rates) - len(solved)),
        ]
        show_table(("solve rate", "tasks"), [(name, str(count)) for name, count in lines])
    rewards, failed = sum(len(rate.rewards) for rate in rates), sum(rate.failed for rate in rates)
    text = f"{counted(len(rates), 'task')}, {counted(rewards, 'sample')} with a reward, {failed} failed"
    reasons = ", ".join(sorted({reason for rate in rates for reason in rate.failures}))
    say(f"{text}{f' ({reasons})' * bool(reasons)}, written to {out}")
