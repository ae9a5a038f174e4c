"""`agl run`: run a Trainer that a file describes or that Python creates; `agl run stop` ends a run from elsewhere."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup
from typing_extensions import override

from agentlightning.base.process_secrets import TOKEN, hold, read_secret
from agentlightning.cli.output import JSON, LOG_JSON, LOG_LEVEL, STORE, log_to_stderr, say, show_json, with_store

START = "start"


class _StartsByDefault(TyperGroup):
    """A group in which `agl run X` is `agl run start X`, unless X is a sub-command."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = [START, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_StartsByDefault, no_args_is_help=True)


@app.callback()
def run() -> None:
    """Run a Trainer: agl run TARGET is agl run start TARGET.

    Example: agl run train.yaml --set trainer.n_runners=4
    """


@app.command(START)
def start(
    target: str = typer.Argument(
        metavar="TARGET", help="A YAML or JSON file, or module:object: a Trainer, or a function to call."
    ),
    agent: str | None = typer.Option(None, help="The agent: module:object or file.py:object."),
    train: str | None = typer.Option(None, help="Tasks to train on: a .jsonl or .json file, or module:object."),
    val: str | None = typer.Option(None, help="Tasks to validate on, in the same forms."),
    settings: list[str] = typer.Option([], "--set", help="A key of the file and its value; may be repeated."),
    dev: bool = typer.Option(False, "--dev", help="Try it quickly (Trainer.dev), with a fast algorithm."),
    log_level: str = LOG_LEVEL,
    log_json: bool = LOG_JSON,
    as_json: bool = JSON,
) -> int:
    """Run a Trainer until its algorithm ends, and show the result.

    Ctrl+C ends the run within seconds: exit code 130 (143 after SIGTERM). An exception of your own code is shown with
    its traceback, exit code 1.

    Example: agl run train.py:trainer --agent train.py:agent --train tasks.jsonl
    """
    from agentlightning.cli.plan import in_foreground

    log_to_stderr(log_level, json_lines=log_json)
    options = {"agent": agent, "train_dataset": train, "val_dataset": val, "dev": dev or None}

    def work() -> None:
        result = _result_of(target, settings, {name: value for name, value in options.items() if value is not None})
        if as_json:
            show_json({"result": result})
        elif result is not None:
            say(f"result: {result}")

    return in_foreground(work)


@app.command("stop")
def stop(
    run_id: str | None = typer.Argument(None, metavar="RUN_ID", help="Id of the run."),
    unnamed: bool = typer.Option(False, "--unnamed", help="The run without a name, of roles that had no AGL_RUN_ID."),
    store: str = STORE,
    reason: str = typer.Option("agl run stop", help="Reason that the processes of the run log."),
) -> None:
    """Stop a run: its algorithm, and its runners on any machine. They check about once a second.

    Example: agl run stop run-1a2b3c --store http://127.0.0.1:4747
    """
    from agentlightning.errors import BadRequestError
    from agentlightning.execution.run_state import name_of_run, stop_run

    if (run_id is None) != unnamed:
        raise BadRequestError("Say which run: its RUN_ID (agl runs list shows them), or --unnamed; not both")
    with_store(store, lambda connection: stop_run(connection, run_id, reason=reason))
    say(f"told {name_of_run(run_id)} to stop")


def _result_of(target: str, settings: list[str], overrides: dict[str, object]) -> object:
    """Run the object that the target names and return its result."""
    from agentlightning.cli.plan import Plan, fit, is_target, load_target, read_plan
    from agentlightning.errors import BadRequestError
    from agentlightning.trainer import Trainer

    if Path(target).is_file() or not is_target(target):
        plan = read_plan(Path(target), settings)
    else:
        target_object = load_target("TARGET", target)
        if settings:
            raise BadRequestError("--set changes keys of a file; TARGET is Python, which has its settings itself")
        if not isinstance(target_object, Trainer):
            if not callable(target_object):
                expected = "expected a Trainer, or a function to call"
                raise BadRequestError(f"TARGET {target!r} is a {type(target_object).__name__}; {expected}")
            if overrides:
                options = ", ".join("--" + name.removesuffix("_dataset") for name in overrides)
                raise BadRequestError(f"{options}: TARGET {target!r} is a function, which chooses these itself")
            return target_object()
        plan = Plan(trainer=target_object)
    return fit(replace(plan, **overrides).checked())


def runner(
    agent: str = typer.Argument(metavar="AGENT", help="The agent to run: module:object or file.py:object."),
    store: str = typer.Option(
        ..., envvar="AGENT_LIGHTNING_STORE_URL", help="The store of the run: http://algorithm-machine:4747."
    ),
    run: str | None = typer.Option(None, envvar="AGL_RUN_ID", help="Id of the run; without one, rollouts of no run."),
    token_file: Path | None = typer.Option(None, help="File with the store's token; AGL_TOKEN by default."),
    runners: int = typer.Option(1, min=1, help="Runner processes."),
    concurrency: int = typer.Option(1, min=1, help="Concurrent rollouts in each process."),
    max_rollouts: int | None = typer.Option(None, min=1, help="Number of rollouts after which a process ends."),
    outage: float = typer.Option(60.0, help="Seconds without an answer of the store before giving up."),
    tracer: str | None = typer.Option(None, help="Import path of another tracer class."),
    log_level: str = LOG_LEVEL,
    log_json: bool = LOG_JSON,
) -> int:
    """Run the rollouts of a run on this machine until the run ends or is stopped.

    It waits for a store that does not answer yet, and for one that restarts. Exit codes: 0 the run has ended;
    69 the store did not answer for --outage seconds; 77 it rejects the token; 130 Ctrl+C; 143 SIGTERM; 1 runners died
    repeatedly. Each runner is a process of its own, restarted when an agent ends it; processes that agents start end
    with it.

    Example: agl runner my_agent:agent --store http://10.0.0.5:4747 --run nightly --runners 4
    """
    from agentlightning.cli.plan import fit, in_foreground
    from agentlightning.errors import BadRequestError

    log_to_stderr(log_level, json_lines=log_json)
    if token_file is not None:
        try:
            hold(TOKEN, read_secret(str(token_file), f"--token-file {token_file}"))
        except ValueError as error:
            raise BadRequestError(str(error)) from error
    if run is not None:
        os.environ["AGL_RUN_ID"] = run

    def work() -> None:
        from agentlightning.cli.plan import Plan, load_target
        from agentlightning.store.spec import spec_of
        from agentlightning.trainer import Trainer

        agent_object = load_target("AGENT", agent)
        trainer = Trainer(
            strategy={"type": "cs", "role": "runner", "managed_store": False},
            store=spec_of(store),
            n_runners=runners,
            max_rollouts=max_rollouts,
            tracer=tracer,
            runner={"concurrency": concurrency, "store_unreachable_timeout": outage},
        )
        fit(Plan(trainer, agent=agent_object() if isinstance(agent_object, type) else agent_object))

    return in_foreground(work)
