"""`agl run`: run a Trainer from a file or from Python; `agl run stop` stops a run from any machine."""

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
    """Run a Trainer. agl run TARGET is short for agl run start TARGET.

    Example: agl run train.yaml --set trainer.n_runners=4
    """


@app.command(START)
def start(
    target: str = typer.Argument(
        metavar="TARGET", help="YAML or JSON file, or module:object of a Trainer or a function"
    ),
    agent: str | None = typer.Option(None, help="Agent: module:object or file.py:object"),
    train: str | None = typer.Option(None, help="Training tasks: a .jsonl, .json or .parquet file, or module:object"),
    val: str | None = typer.Option(None, help="Validation tasks, in the same forms as --train"),
    settings: list[str] = typer.Option([], "--set", help="KEY=VALUE that overrides a key of the file; may be repeated"),
    dev: bool = typer.Option(False, "--dev", help="Call Trainer.dev for a short trial with a fast algorithm"),
    log_level: str = LOG_LEVEL,
    log_json: bool = LOG_JSON,
    as_json: bool = JSON,
) -> int:
    """Run a Trainer until its algorithm ends, and show the result.

    Press Ctrl+C to stop the run within seconds (exit code 130, or 143 after SIGTERM). An exception in your own code is
    shown with its traceback (exit code 1).

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
    run_id: str | None = typer.Argument(None, metavar="RUN_ID", help="Id of the run"),
    unnamed: bool = typer.Option(False, "--unnamed", help="Stop the run without an id (AGL_RUN_ID was not set)"),
    store: str = STORE,
    reason: str = typer.Option("agl run stop", help="Reason to write to the log of each process of the run"),
) -> None:
    """Stop the algorithm and all runners of a run, on any machine. They check for a stop about once a second.

    Example: agl run stop run-1a2b3c --store http://127.0.0.1:4747
    """
    from agentlightning.errors import BadRequestError
    from agentlightning.execution.run_state import name_of_run, stop_run

    if (run_id is None) != unnamed:
        raise BadRequestError("Name either a RUN_ID (see agl runs list) or --unnamed")
    with_store(store, lambda connection: stop_run(connection, run_id, reason=reason))
    say(f"stop requested for {name_of_run(run_id)}")


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
            raise BadRequestError("--set requires a file as TARGET. Change the settings in the Python code instead")
        if not isinstance(target_object, Trainer):
            if not callable(target_object):
                expected = "Expected a Trainer or a function"
                raise BadRequestError(f"TARGET {target!r} is a {type(target_object).__name__}. {expected}")
            if overrides:
                options = ", ".join("--" + name.removesuffix("_dataset") for name in overrides)
                raise BadRequestError(f"{options} has no effect: TARGET {target!r} is a function. Set it in the code")
            return target_object()
        plan = Plan(trainer=target_object)
    return fit(replace(plan, **overrides).checked())


def runner(
    agent: str = typer.Argument(metavar="AGENT", help="Agent to run: module:object or file.py:object"),
    store: str = typer.Option(
        ..., envvar="AGENT_LIGHTNING_STORE_URL", help="Store of the run: http://algorithm-machine:4747"
    ),
    run: str | None = typer.Option(None, envvar="AGL_RUN_ID", help="Id of the run; by default the run without an id"),
    token_file: Path | None = typer.Option(None, help="File with the store's token; AGL_TOKEN by default"),
    runners: int = typer.Option(1, min=1, help="Number of runner processes"),
    concurrency: int = typer.Option(1, min=1, help="Number of concurrent rollouts in each process"),
    max_rollouts: int | None = typer.Option(None, min=1, help="Number of rollouts after which a runner ends"),
    outage: float = typer.Option(60.0, help="Seconds without a response from the store before giving up"),
    tracer: str | None = typer.Option(None, help="Import path of a tracer class, instead of the default"),
    log_level: str = LOG_LEVEL,
    log_json: bool = LOG_JSON,
) -> int:
    """Run the rollouts of a run on this machine until the run ends or is stopped.

    The command waits for a store that is not yet running or that restarts. Each runner is a separate process, which is
    restarted if an agent terminates it. Processes that an agent started end with their runner. After SIGTERM, rollouts
    in progress have 10 s to finish; after Ctrl+C, about one second. Exit codes: 0 the run has ended; 1 runners died
    repeatedly; 69 the store did not respond for --outage seconds; 77 the store rejected the token; 130 Ctrl+C; 143
    SIGTERM.

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
